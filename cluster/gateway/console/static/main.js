// Routes, the clock, the key, the colours. One view is shown at a time, and asks for its own data about once a second.

import { Away, Locked, ask, key } from "./api.js";
import { h, render } from "./dom.js";
import { seconds } from "./format.js";
import * as request from "./request.js";
import * as requests from "./requests.js";
import * as topology from "./topology.js";

const EVERY_MS = 1000;
const main = document.getElementById("main");
const door = document.getElementById("door");

const shown = { view: null, argument: "", data: null, fresh: 0, trouble: "", turn: 0, timer: 0 };

function route() {
  const [, name = "", argument = ""] = location.hash.match(/^#\/?([^/]*)\/?(.*)$/) ?? [];
  if (name === "request" && argument) {
    try {
      return [request, decodeURIComponent(argument)];
    } catch {
      return [request, argument]; // no valid escape: it is looked up as it is
    }
  }
  return [name === "requests" ? requests : topology, ""];
}

function go() {
  const [view, argument] = route();
  if (view === shown.view && argument === shown.argument) return;
  Object.assign(shown, { view, argument, data: null, fresh: 0, trouble: "" });
  document.title = `${view.title(argument)} · Moonpool`;
  render(main, []);
  draw();
  main.focus({ preventScroll: true });
  window.scrollTo(0, 0);
  poll();
}

async function poll() {
  clearTimeout(shown.timer);
  const { view, argument } = shown;
  const turn = (shown.turn += 1);
  try {
    if (!document.hidden && !door.open) await look(view, argument, turn);
  } finally {
    if (turn === shown.turn) shown.timer = setTimeout(poll, view.every?.(shown.data) ?? EVERY_MS);
  }
}

// Another view may be shown by the time of the answer.
async function look(view, argument, turn) {
  try {
    const data = await ask(view.source(argument));
    if (turn === shown.turn) Object.assign(shown, { data, fresh: performance.now(), trouble: "" });
  } catch (error) {
    if (!(error instanceof Locked || error instanceof Away)) throw error;
    if (turn === shown.turn && error instanceof Locked) lock(error.message);
    else if (turn === shown.turn) shown.trouble = error.message;
  }
  if (turn === shown.turn) draw();
}

function draw() {
  const { view, argument, data, trouble } = shown;
  render(document.getElementById("nav"), [
    link("#/", "Topology", view === topology),
    link("#/requests", "Requests", view === requests || view === request),
  ]);
  render(document.getElementById("state"), state());
  if (data?.cluster) render(document.getElementById("about"), [data.cluster, " · ", data.models.join(", "), " · ", data.version]);
  if (data !== null) render(main, view.show(data, { argument, redraw: draw }));
  else render(main, [h("p", { class: "empty" }, trouble || (door.open ? "Locked." : "Looking …"))]);
}

function link(href, text, here) {
  return h("a", { href, "aria-current": here ? "page" : null }, text);
}

function state() {
  if (door.open) return [h("span", { class: "dot off" }), "locked"];
  if (shown.trouble) return [h("span", { class: "dot gone" }), shown.trouble.slice(0, 120)];
  if (!shown.fresh) return [h("span", { class: "dot off" }), "asking"];
  const age = (performance.now() - shown.fresh) / 1000;
  return age < 3 ? [h("span", { class: "dot live" }), "live"] : [h("span", { class: "dot silent" }), `${seconds(age)} old`];
}

// the key

function lock(why) {
  const had = key.get() !== "";
  key.forget();
  document.getElementById("door-why").textContent = had ? why : "This gateway asks for API keys.";
  if (!door.open) door.showModal();
  document.getElementById("key").focus();
}

document.getElementById("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  const field = document.getElementById("key");
  key.set(field.value.trim());
  field.value = "";
  door.close();
  poll();
});
door.addEventListener("cancel", (event) => event.preventDefault()); // nothing is to be seen without a key

// colours

const COLOURS = [
  ["auto", "◐", "Colours: as the system has them"],
  ["dark", "☾", "Colours: dark"],
  ["light", "☀", "Colours: light"],
];

function colour(name) {
  const [chosen, sign, label] = COLOURS.find(([one]) => one === name) ?? COLOURS[0];
  const button = document.getElementById("theme");
  document.documentElement.dataset.theme = chosen;
  button.textContent = sign;
  button.setAttribute("aria-label", label);
  button.title = label;
  localStorage.setItem("moonpool.colours", chosen);
}

document.getElementById("theme").addEventListener("click", () => {
  const at = COLOURS.findIndex(([name]) => name === document.documentElement.dataset.theme);
  colour(COLOURS[(at + 1) % COLOURS.length][0]);
});

colour(localStorage.getItem("moonpool.colours") ?? "auto");
window.addEventListener("hashchange", go);
document.addEventListener("visibilitychange", () => {
  if (!document.hidden) poll();
});
go();
