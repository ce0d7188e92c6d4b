// One request: its steps in every process on one clock, and why it went where it went.

import { decision } from "./decision.js";
import { h } from "./dom.js";
import { clock, count, ms, percent, rate, seconds, words } from "./format.js";
import { badge, card, pill, table } from "./parts.js";
import { outcome } from "./requests.js";

export const title = (id) => id.slice(0, 40);
export const source = (id) => `request/${encodeURIComponent(id)}`;
export const every = (data) => (data === null || data.flight === null || data.flight.stage !== "ended" || data.flight.attempts === 0 ? 1000 : 4000);

// What a step is: waiting for somebody, computing, moving bytes, or streaming.
const KINDS = {
  tokenise: "work", place: "wait", open: "wait", first_token: "wait", stream: "stream",
  queue: "wait", landing: "wait", prefix: "move", compute: "work", sample: "work", drain: "move",
  land: "move", join: "move", decode: "stream", hold: "hold",
};

const zoom = { id: "", whole: null };

export function show(data, { argument, redraw }) {
  if (!data.found) {
    return [h("h1", { key: "title" }, "Not remembered"), h("p", { class: "empty", key: "why" }, `Nobody remembers ${argument}. Gateways and workers keep their newest requests only; ids are those of answers, or their header x-moonpool-request-id.`)];
  }
  return [
    h("p", { class: "back", key: "back" }, h("a", { href: "#/requests" }, "← Requests")),
    h("h1", { class: "id", key: "title" }, data.choice),
    data.flight ? facts(data.flight) : null,
    data.choices.length > 1 ? choices(data) : null,
    data.waterfall ? steps(data, redraw) : null,
    decision(data.decision),
    data.waterfall ? instants(data.waterfall) : null,
  ];
}

function facts(one) {
  const rows = [
    ["Outcome", one.stage === "ended" ? outcome(one.outcome) : pill(one.stage, one.stage)],
    ["Client's id", one.theirs || "–"],
    ["Tenant", one.tenant],
    ["Model", one.model || "–"],
    ["Prompt", `${count(one.prompt_tokens)} tokens, ${count(one.cached_tokens)} cached (${percent(one.prompt_tokens ? one.cached_tokens / one.prompt_tokens : 0)})`],
    ["Answer", `${count(one.output_tokens)} tokens, ${rate(one.tokens_per_s, "tok/s")}`],
    ["First token", ms(one.ttft_ms)],
    ["Took", `${seconds(one.seconds)}, arrived ${clock(one.arrived_at)}`],
  ];
  if (one.kind) rows.splice(3, 0, ["Kind", one.kind]);
  if (one.attempts > 1) rows.push(["Attempts", count(one.attempts)]);
  return h("dl", { class: "facts", key: "facts" }, rows.map(([name, value]) => h("div", { key: name }, h("dt", {}, name), h("dd", {}, value))));
}

function choices(data) {
  return h("nav", { class: "choices", key: "choices", "aria-label": "Choices" }, data.choices.map((one) => h("a", { key: one, href: `#/request/${encodeURIComponent(one)}`, "aria-current": one === data.choice ? "page" : null }, one.slice(one.lastIndexOf("-") + 1))));
}

function steps(data, redraw) {
  const { rows, ms: whole, tries } = data.waterfall;
  const first = firstToken(rows);
  if (zoom.id !== data.choice) Object.assign(zoom, { id: data.choice, whole: null });
  const near = first !== null && first < whole * 0.45;
  const showWhole = zoom.whole ?? !near;
  const span = (showWhole ? whole : Math.min(whole, first * 1.15)) || 1;
  const choose = (value) => () => {
    zoom.whole = value;
    redraw();
  };
  const beside = near
    ? h(
        "span",
        { class: "switch", role: "group", "aria-label": "Stretch of time" },
        h("button", { type: "button", "aria-pressed": String(!showWhole), on: { click: (beginning ??= choose(false)) } }, "until the first token"),
        h("button", { type: "button", "aria-pressed": String(showWhole), on: { click: (everything ??= choose(true)) } }, "all of it"),
      )
    : null;
  const kinds = [["wait", "waits"], ["work", "computes"], ["move", "moves KV"], ["stream", "answers"], ["hold", "holds"]];
  return card(
    "Waterfall",
    { key: "waterfall", class: "waterfall", beside },
    h("ul", { class: "legend" }, kinds.map(([kind, text]) => h("li", { key: kind }, h("span", { class: `swatch k-${kind}` }), text))),
    axis(span),
    h("ol", { class: "tracks" }, rows.map((row, at) => track(row, span, first, at))),
    tries.length > 1 ? attempts(tries) : null,
    rows.some((row) => row.moved) ? h("p", { class: "fine" }, "Rows of other hosts are laid so that the instants they share with this one meet: their clocks are their own.") : null,
  );
}

let beginning = null; // listeners that stay the same from update to update
let everything = null;

function firstToken(rows) {
  return rows[0].instants.find((one) => one.name === "first_token")?.at_ms ?? null;
}

function axis(span) {
  const step = [1, 2, 5].flatMap((n) => [0.1, 1, 10, 100, 1000, 10000, 100000].map((scale) => n * scale)).sort((a, b) => a - b).find((one) => span / one <= 6) ?? span;
  const ticks = [];
  for (let at = 0; at <= span; at += step) ticks.push(at);
  return h("div", { class: "axis", "aria-hidden": "true" }, ticks.map((at) => h("span", { key: at, style: { left: `${((100 * at) / span).toFixed(2)}%` } }, at === 0 ? "0" : ms(at))));
}

function track(row, span, first, index) {
  const lanes = [];
  const placed = row.steps.map((step) => {
    let lane = lanes.findIndex((end) => end <= step.begin_ms + span * 0.002);
    if (lane < 0) lane = lanes.push(0) - 1;
    lanes[lane] = step.end_ms;
    return [step, lane];
  });
  const label = [badge(row.role), h("b", {}, row.member), row.role === "gateway" ? null : h("small", {}, `attempt ${row.attempt}`)];
  return h(
    "li",
    { key: `${row.member} ${row.attempt} ${index}`, class: "track", "data-member": row.member },
    h("div", { class: "track-name" }, label),
    h(
      "div",
      { class: "lane", style: { "--lanes": Math.max(1, lanes.length) } },
      first === null || first > span ? null : h("i", { class: "first", style: { left: `${((100 * first) / span).toFixed(3)}%` }, title: `first token: ${ms(first)}` }),
      placed.map(([step, lane]) => block(step, lane, span)),
    ),
  );
}

function block(step, lane, span) {
  const begin = Math.min(100, Math.max(0, (100 * step.begin_ms) / span));
  const width = Math.max(0, Math.min(100, (100 * step.end_ms) / span) - begin);
  const took = ms(step.end_ms - step.begin_ms);
  const said = `${words(step.name)}: ${step.text}; ${took}${step.open ? " so far" : ""}, from ${ms(step.begin_ms)}`;
  return h(
    "span",
    { key: `${step.name} ${step.begin_ms}`, class: `step k-${KINDS[step.name] ?? "wait"} ${step.open ? "open" : ""}`, "data-step": step.name, tabindex: "0", role: "img", "aria-label": said, title: said, style: { left: `${begin.toFixed(3)}%`, width: `${width.toFixed(3)}%`, "--lane": lane } },
    width > 9 ? `${words(step.name)} ${took}` : width > 5 ? words(step.name) : null,
  );
}

function attempts(tries) {
  const rows = tries.map((one) =>
    h("tr", { key: one.attempt }, h("td", {}, one.attempt), h("td", {}, words(String(one.facts.outcome ?? "under way"))), h("td", {}, one.facts.prefill ? `${one.facts.prefill} → ${one.facts.decode}` : "–"), h("td", {}, String(one.facts.peer ?? "–")), h("td", { class: "number" }, ms(one.begin_ms)), h("td", { class: "number" }, one.end_ms === null ? "–" : ms(one.end_ms))),
  );
  return [h("h3", {}, "Attempts"), table("Attempts", [["attempt"], ["outcome"], ["where"], ["failed by"], ["from", "number"], ["until", "number"]], rows)];
}

function instants(fall) {
  const rows = fall.rows.flatMap((row, index) => row.steps.map((step) => h("tr", { key: `${index} ${row.member} ${step.name} ${step.begin_ms}` }, h("td", {}, row.member), h("td", {}, `${step.number}`), h("td", {}, words(step.name)), h("td", {}, step.text), h("td", { class: "number" }, ms(step.begin_ms)), h("td", { class: "number" }, ms(step.end_ms - step.begin_ms)))));
  return card("Every step", { key: "steps" }, h("details", {}, h("summary", {}, `${rows.length} steps in ${fall.rows.length} rows`), table("Steps of the request", [["process"], ["of ten"], ["step"], ["what"], ["from", "number"], ["took", "number"]], rows)));
}
