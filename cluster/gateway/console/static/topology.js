// Who is there, what they hold, what flows between them.

import { h } from "./dom.js";
import { bytes, clock, count, ms, percent, rate, words } from "./format.js";
import { badge, bar, card, legend, pill, tile } from "./parts.js";
import { flows } from "./flows.js";

const KEPT = 60; // looks behind the tiles
const SOURCES = {
  device: ["device pages", "s-device"],
  pool: ["this host's pool", "s-pool"],
  remote: ["another node", "s-remote"],
  computed: ["computed", "s-computed"],
};
const TIERS = { dram: ["DRAM", "s-pool"], ssd: ["SSD", "s-ssd"], shared: ["shared tier", "s-remote"] };

const past = { at: 0, looks: [], states: new Map(), news: [] };

export const title = () => "Topology";
export const source = () => "cluster";

export function show(data) {
  remember(data);
  return [
    h("h1", { class: "unseen", key: "title" }, "Topology"),
    tiles(data),
    h("div", { class: "nodes", key: "nodes" }, nodes(data).map(([name, members]) => node(name, members, data))),
    h(
      "div",
      { class: "pair", key: "flows" },
      card("KV between nodes", { key: "kv", class: "kv" }, flows(data)),
      h("div", { class: "stack", key: "side" }, hits(data), refused(data), news()),
    ),
  ];
}

function remember(data) {
  if (data.at === past.at) return;
  past.at = data.at;
  past.looks = [...past.looks, data].slice(-KEPT);
  for (const member of data.members) {
    const state = member.state === "live" ? (member.ready ? "ready" : "not ready") : member.state;
    const before = past.states.get(member.id);
    if (before !== undefined && (before.state !== state || before.life !== member.life)) {
      const what = before.life !== member.life ? `began a new life, ${state}` : `is ${state}`;
      past.news = [{ at: data.at, id: member.id, what, note: member.note, state: member.state }, ...past.news].slice(0, 30);
    }
    past.states.set(member.id, { state, life: member.life });
  }
}

function tiles(data) {
  const of = (value) => past.looks.map(value);
  const gateways = data.gateways.filter((one) => one.answers > 0);
  const best = gateways.reduce((a, b) => (b.answers > (a?.answers ?? 0) ? b : a), null); // of several, the one that answered most
  const hit = hitShare(data);
  return h(
    "div",
    { class: "tiles", key: "tiles" },
    tile("In flight", count(data.in_flight), `${count(data.waiting)} wait for a worker`, of((one) => one.in_flight)),
    tile("Output", rate(data.output_rate), "tokens per second", of((one) => one.output_rate)),
    tile("Prompts", rate(data.prompt_rate), "tokens per second", of((one) => one.prompt_rate)),
    tile("Cache hits", percent(hit), "of prompt tokens", of(hitShare)),
    tile("Time to first token", best?.ttft_ms ? ms(best.ttft_ms[0]) : "–", best?.ttft_ms ? `90 %: ${ms(best.ttft_ms[1])}` : "no answers lately", of((one) => one.gateways[0]?.ttft_ms?.[0] ?? null)),
    tile("Between tokens", best?.tbt_ms ? ms(best.tbt_ms[0]) : "–", best?.tbt_ms ? `90 %: ${ms(best.tbt_ms[1])}` : "slowest tenth of gaps", of((one) => one.gateways[0]?.tbt_ms?.[0] ?? null)),
  );
}

function hitShare(data) {
  const computed = data.sources.find((one) => one.name === "computed");
  return computed === undefined ? null : 1 - computed.share;
}

function nodes(data) {
  const found = new Map();
  for (const member of data.members) {
    if (!found.has(member.node)) found.set(member.node, []);
    found.get(member.node).push(member);
  }
  const order = ["store", "gateway", "conductor", "prefill", "decode", "both"];
  for (const members of found.values()) members.sort((a, b) => order.indexOf(a.role) - order.indexOf(b.role) || a.id.localeCompare(b.id, "en", { numeric: true }));
  return [...found].sort(([a], [b]) => a.localeCompare(b, "en", { numeric: true }));
}

function node(name, members, data) {
  const live = members.filter((one) => one.state === "live").length;
  const beside = h("small", {}, `${live} of ${members.length} live`);
  return card(`Node ${name}`, { key: `node ${name}`, class: live < members.length ? "node hurt" : "node", beside }, h("ul", { class: "members" }, members.map((one) => member(one, data))));
}

function member(one, data) {
  const about = { store: store, gateway: gateway, conductor: conductor }[one.role] ?? worker;
  const state = one.state !== "live" ? one.state : one.ready ? "ready" : "not ready";
  return h(
    "li",
    { key: one.id, class: `member ${one.state}`, "data-member": one.id, "data-state": state },
    h(
      "div",
      { class: "who" },
      badge(one.role),
      h("b", {}, one.id),
      one.leads > 0 ? pill("leads", `leads, term ${one.leads}`) : null,
      data.models.length > 1 && one.model ? h("small", {}, one.model) : null,
      h("span", { class: "mood", title: `life ${one.life}${one.note ? `: ${one.note}` : ""}` }, h("span", { class: `dot ${one.state === "live" && !one.ready ? "silent" : one.state}` }), state),
    ),
    one.note ? h("div", { class: "note" }, one.note) : null,
    one.state === "live" ? about(one, data) : null,
  );
}

function store(one, data) {
  const pool = data.pools.find((other) => other.id === one.id);
  if (!pool) return null;
  const total = Object.values(pool.slots).reduce((a, b) => a + b, 0) || 1;
  const parts = [
    { name: "sealed", share: pool.slots.sealed / total, kind: "f-sealed", text: `${count(pool.slots.sealed)} slots` },
    { name: "reserved", share: pool.slots.reserved / total, kind: "f-reserved", text: `${count(pool.slots.reserved)} slots` },
    { name: "fenced", share: pool.slots.fenced / total, kind: "f-fenced", text: `${count(pool.slots.fenced)} slots` },
  ];
  const said = [`${percent(pool.used_share)} of ${bytes(pool.bytes)}`, `${count(pool.blocks)} blocks`, `${count(pool.pins)} pins`];
  if (pool.slots.fenced) said.push(`${count(pool.slots.fenced)} fenced`);
  if (pool.ssd_share !== null) said.push(`SSD ${percent(pool.ssd_share)}, ${count(pool.blocks_on_ssd)} blocks`);
  return [bar(parts, `Pool of ${one.id}`), h("div", { class: "line" }, said.map((text) => h("span", { key: text }, text)))];
}

function worker(one, data) {
  const own = data.workers.find((other) => other.id === one.id);
  if (!own) return null;
  const pages = own.pages || 1;
  const parts = [
    { name: "in use", share: own.pages_used / pages, kind: `f-${one.role}`, text: `${count(own.pages_used)} pages` },
    { name: "cached", share: own.pages_cached / pages, kind: "f-cached", text: `${count(own.pages_cached)} pages` },
  ];
  const said = [`${count(own.running)} running`, `${count(own.waiting)} waiting`, rate(own.speed, own.role === "prefill" ? "tok/s computed" : "tok/s")];
  if (own.filling) said.splice(2, 0, own.role === "prefill" ? `${count(own.filling)} draining` : `${count(own.filling)} filling`);
  return [bar(parts, `Device pages of ${one.id}`), h("div", { class: "line" }, said.map((text, at) => h("span", { key: at }, text)))];
}

function gateway(one, data) {
  const own = data.gateways.find((other) => other.id === one.id);
  if (!own) return null;
  const said = [`${count(own.in_flight)} in flight`, `${count(own.connections)} connections`, `${count(own.answers)} answers in ${own.window_s.toFixed(0)} s`];
  return h("div", { class: "line" }, said.map((text, at) => h("span", { key: at }, text)));
}

function conductor(one, data) {
  const own = data.conductors.find((other) => other.id === one.id);
  if (!own) return null;
  const said = [`${count(own.waiting)} waiting`, `${count(own.bookings)} booked`, `${rate(own.placed)} placed/s`];
  return h("div", { class: "line" }, said.map((text, at) => h("span", { key: at }, text)));
}

function shares(told, known) {
  return told.map((one) => ({ name: known[one.name]?.[0] ?? words(one.name), kind: known[one.name]?.[1] ?? "s-computed", share: one.share }));
}

function hits(data) {
  const parts = shares(data.sources, SOURCES);
  const tiers = shares(data.tiers, TIERS);
  return card(
    "Where prompts' KV came from",
    { key: "hits" },
    parts.length ? [bar(parts, "Prompt tokens"), legend(parts)] : h("p", { class: "empty" }, "No prompts yet."),
    tiers.length ? h("p", { class: "fine" }, "From pools, by tier: ", tiers.filter((one) => one.share > 0).map((one) => `${one.name} ${percent(one.share)}`).join(", ")) : null,
  );
}

function refused(data) {
  const rows = data.refusals.map((one) => h("li", { key: one.reason }, h("span", {}, words(one.reason)), h("b", {}, count(one.count)), h("small", {}, one.rate ? `${rate(one.rate)}/s` : "")));
  return card("Refused", { key: "refused" }, rows.length ? h("ul", { class: "rows" }, rows) : h("p", { class: "empty" }, "Nothing was refused."));
}

function news() {
  const rows = past.news.map((one, at) => h("li", { key: `${one.at} ${one.id} ${at}` }, h("span", { class: `dot ${one.state}` }), h("small", {}, clock(one.at)), h("span", {}, `${one.id} ${one.what}`)));
  return card("Since you look", { key: "news" }, rows.length ? h("ul", { class: "rows", "aria-live": "polite" }, rows) : h("p", { class: "empty" }, "Nobody came or went."));
}

