// Requests of this gateway: where each one under way is, and how the newest ones went.

import { h } from "./dom.js";
import { clock, count, ms, percent, rate, seconds, words } from "./format.js";
import { card, pill, request, table } from "./parts.js";

export const title = () => "Requests";
export const source = () => "requests";

const STAGES = ["reading", "tokenising", "placing", "prefill", "decode"];

export function show(data) {
  const running = data.flights.length < data.in_flight ? h("small", {}, `the newest ${data.flights.length} of ${data.in_flight}`) : h("small", {}, `${data.flights.length} at ${data.gateway}`);
  return [
    h("h1", { class: "unseen", key: "title" }, "Requests"),
    card(
      "Under way",
      { key: "flights", beside: running },
      stages(data.flights),
      data.flights.length
        ? table("Requests under way", [["Request"], ["Stage"], ["Where"], ["Prompt", "number"], ["Answer", "wide"], ["Speed", "number"], ["Age", "number"]], data.flights.map(flight), { class: "flights" })
        : h("p", { class: "empty" }, "Nothing is under way at this gateway."),
    ),
    card(
      "Ended",
      { key: "ended", beside: h("small", {}, "the newest first") },
      data.ended.length
        ? table("Requests that ended", [["Request"], ["Outcome"], ["Where"], ["Prompt", "number"], ["Answer", "number"], ["First token", "number"], ["Speed", "number"], ["Took", "number"], ["Arrived", "number"]], data.ended.map(ended), { class: "flights" })
        : h("p", { class: "empty" }, "No request has ended yet."),
    ),
  ];
}

// How many are in each stage, in the order in which a request passes them.
function stages(flights) {
  return h(
    "ol",
    { class: "stages" },
    STAGES.map((stage) => {
      const there = flights.filter((one) => one.stage === stage).length;
      return h("li", { key: stage, class: there ? `stage ${stage}` : "stage none" }, h("b", {}, count(there)), h("span", {}, stage));
    }),
  );
}

function name(one) {
  const more = [one.theirs, one.tenant === "default" ? "" : one.tenant, one.kind, one.endpoint].filter((text) => text);
  return h("td", { class: "name" }, request(one.id), h("div", { class: "fine", title: more.join(" · ") }, more.map((text, at) => h("span", { key: at, class: at === 0 && one.theirs ? "theirs" : null }, text))));
}

function where(one) {
  if (!one.prefill) return h("td", { class: "where" }, "–");
  if (one.prefill === one.decode) return h("td", { class: "where" }, one.decode);
  return h("td", { class: "where" }, one.prefill, h("span", { class: "arrow", "aria-label": "then" }, "→"), one.decode);
}

function prompt(one) {
  const share = one.prompt_tokens ? one.cached_tokens / one.prompt_tokens : 0;
  return h("td", { class: "number" }, count(one.prompt_tokens), h("div", { class: "fine" }, one.cached_tokens ? `${percent(share)} cached` : ""));
}

function flight(one) {
  const share = one.max_tokens ? one.output_tokens / one.max_tokens : 0;
  return h(
    "tr",
    { key: one.id, "data-request": one.id },
    name(one),
    h("td", {}, pill(one.stage, one.stage), one.attempts > 1 ? h("div", { class: "fine" }, `attempt ${one.attempts}`) : null),
    where(one),
    prompt(one),
    h("td", { class: "wide" }, h("div", { class: "done", "aria-hidden": "true" }, h("span", { style: { width: `${Math.min(100, 100 * share).toFixed(1)}%` } })), h("div", { class: "fine" }, `${count(one.output_tokens)} of at most ${count(one.max_tokens)}`)),
    h("td", { class: "number" }, rate(one.tokens_per_s, "tok/s")),
    h("td", { class: "number" }, seconds(one.seconds)),
  );
}

function ended(one) {
  return h(
    "tr",
    { key: one.id, "data-request": one.id },
    name(one),
    h("td", {}, outcome(one.outcome), one.attempts > 1 ? h("div", { class: "fine" }, `${one.attempts} attempts`) : null),
    where(one),
    prompt(one),
    h("td", { class: "number" }, count(one.output_tokens)),
    h("td", { class: "number" }, ms(one.ttft_ms)),
    h("td", { class: "number" }, rate(one.tokens_per_s, "tok/s")),
    h("td", { class: "number" }, seconds(one.seconds)),
    h("td", { class: "number" }, clock(one.arrived_at)),
  );
}

export function outcome(text) {
  return pill(text === "ok" ? "good" : text === "cancelled" ? "left" : "bad", words(text));
}
