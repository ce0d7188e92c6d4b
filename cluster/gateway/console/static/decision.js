// What the conductor knew, whom it considered, what it predicted, and what came true.

import { h } from "./dom.js";
import { count, ms, words } from "./format.js";
import { bar, card, legend, pill, table } from "./parts.js";

const PREFILL = [
  ["worker", "worker"], ["first token", "ttft_ms"], ["at most", "ttft_high_ms"], ["waits", "wait_ms"], ["computes", "work_ms"],
  ["cached", "cached_tokens"], ["own blocks", "own_blocks"], ["host's blocks", "node_blocks"],
];
const DECODE = [["worker", "worker"], ["between tokens", "tbt_ms"], ["batch", "batch"], ["context", "context_tokens"]];
const SOURCES = { reuse: "s-device", fetch: "s-remote", recompute: "s-computed" };

export function decision(told) {
  if (told === null) return card("Decision", { key: "decision" }, h("p", { class: "empty" }, "No conductor remembers it: it was not placed yet, or is too old."));
  const beside = h("small", {}, `by ${told.conductor}`);
  return card("Decision", { key: "decision", beside }, told.decisions.map((one, at) => h("div", { class: "decision", key: `${one.asked.attempt} ${at}` }, attempt(one))));
}

function attempt(one) {
  const asked = one.asked;
  return [
    h("p", { class: "verdict" }, verdict(one), ` attempt ${asked.attempt}, policy ${one.policy}, admission ${one.admission}`, one.waited_ms >= 1 ? `, waited ${ms(one.waited_ms)} for a worker` : ""),
    one.refused ? h("p", { class: "reason" }, one.refused.message) : null,
    h("p", { class: "fine" }, `${count(asked.prompt_tokens)} prompt tokens in ${count(asked.blocks)} whole blocks; ${one.held.deepest_blocks ? `${count(one.held.deepest_blocks)} leading blocks were held by ${one.held.holders.join(", ")}` : "no pool held any of them"}.`),
    blocks(one),
    compared(one),
    candidates("Prefill workers considered", PREFILL, one.prefill_candidates, one.prefill_considered),
    candidates("Decode workers considered", DECODE, one.decode_candidates, one.decode_considered),
  ];
}

function verdict(one) {
  if (one.placed) return [pill("good", "placed"), h("b", {}, ` ${one.placed.prefill.id} → ${one.placed.decode.id}`), ";"];
  if (one.refused) return [pill("bad", "refused"), h("b", {}, ` ${words(one.refused.reason)}`), ";"];
  return [pill("wait", "waits"), " for a worker;"];
}

function blocks(one) {
  const segments = one.placed?.segments ?? [];
  const whole = segments.reduce((sum, part) => sum + part.count, 0);
  if (!whole) return null;
  const parts = segments.map((part, at) => ({ key: at, name: `${part.source}${part.node ? ` from ${part.node}` : ""}`, share: part.count / whole, kind: SOURCES[part.source] ?? "s-computed", text: `${count(part.count)} blocks` }));
  const moved = one.transfer?.source ? h("p", { class: "fine" }, `${count(one.transfer.blocks)} blocks come from ${one.transfer.source} in ${ms(one.transfer.ms)}, beside ${count(one.transfer.flows_under_way)} other flows.`) : null;
  return [bar(parts, "Blocks of the prompt"), legend(parts), moved];
}

// Prediction and truth under each other, on one scale.
function compared(one) {
  const { predicted, actual } = one;
  if (!predicted) return null;
  const rows = [
    ["First token", predicted.ttft_ms, predicted.ttft_high_ms, actual?.ttft_ms || null, predicted.ttft_sure],
    ["Between tokens", predicted.tbt_ms, predicted.tbt_high_ms, actual?.tbt_ms || null, predicted.tbt_sure],
  ];
  return h(
    "div",
    { class: "compared" },
    rows.map(([name, likely, high, came, sure]) => {
      const most = Math.max(high, came ?? 0, 1e-6) * 1.05;
      const at = (value) => `${((100 * value) / most).toFixed(2)}%`;
      return h(
        "div",
        { key: name },
        h("h3", {}, name),
        h("div", { class: "scale", role: "img", "aria-label": `${name}: predicted ${ms(likely)}, at most ${ms(high)}; was ${ms(came)}` }, h("span", { class: "predicted", style: { width: at(likely) } }), h("span", { class: "upto", style: { left: at(likely), width: at(Math.max(0, high - likely)) } }), came === null ? null : h("span", { class: came > high ? "came late" : "came", style: { width: at(came) } })),
        h("p", { class: "fine" }, `predicted ${ms(likely)}, up to ${ms(high)}${sure ? "" : " (not sure yet)"}; `, h("b", {}, came === null ? "not over yet" : `was ${ms(came)}`)),
      );
    }),
    one.regret_ms === null ? null : h("p", { class: "fine" }, `Regret: ${ms(one.regret_ms)} later than the best candidate was predicted to be.`),
  );
}

function candidates(caption, columns, rows, considered) {
  if (!rows?.length) return null;
  const heads = columns.map(([head], at) => [head, at ? "number" : null]);
  const body = rows.map((row, at) =>
    h(
      "tr",
      { key: row.worker, class: at === 0 ? "chosen" : null },
      columns.map(([, name]) => h("td", { class: name === "worker" ? null : "number" }, name === "worker" ? [row.worker, at === 0 ? " ★" : ""] : name.endsWith("_ms") ? ms(row[name]) : count(row[name]))),
    ),
  );
  return [h("h3", {}, caption, h("small", {}, considered > rows.length ? `the best ${rows.length} of ${considered}` : "★ chosen")), table(caption, heads, body)];
}
