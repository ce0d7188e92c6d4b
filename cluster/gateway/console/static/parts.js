// Pieces that several views are made of.

import { h } from "./dom.js";
import { percent } from "./format.js";

export const ROLES = {
  gateway: ["G", "gateway"],
  conductor: ["C", "conductor"],
  prefill: ["P", "prefill worker"],
  decode: ["D", "decode worker"],
  both: ["B", "prefill and decode worker"],
  store: ["S", "store node"],
};

export function badge(role) {
  const [letter, text] = ROLES[role] ?? ["?", role];
  return h("span", { class: `badge ${role}`, title: text, role: "img", "aria-label": text }, letter);
}

export function pill(kind, text, title) {
  return h("span", { class: `pill ${kind}`, title }, text);
}

export function card(title, props, ...children) {
  return h("section", { class: `card ${props.class ?? ""}`, key: props.key, "aria-label": title }, h("h2", {}, title, props.beside ?? null), children);
}

// A bar of parts: [{name, share, kind, text}], shares of 1. Said in words, too, for who does not see it.
export function bar(parts, label) {
  const said = parts.filter((part) => part.share > 0).map((part) => `${part.name} ${part.text ?? percent(part.share)}`);
  return h(
    "div",
    { class: "bar", role: "img", "aria-label": `${label}: ${said.join(", ") || "nothing"}`, title: said.join(" · ") },
    parts.map((part) =>
      h("span", { class: part.kind, key: part.key ?? part.name, style: { width: `${Math.max(0, Math.min(100, 100 * part.share)).toFixed(2)}%` } }),
    ),
  );
}

export function legend(parts) {
  return h(
    "ul",
    { class: "legend" },
    parts.map((part) => h("li", { key: part.key ?? part.name }, h("span", { class: `swatch ${part.kind}` }), part.name, " ", h("b", {}, part.text ?? percent(part.share)))),
  );
}

// One figure with its last minute behind it. `values` may hold nulls: not known then.
export function tile(name, value, under, values = []) {
  return h(
    "div",
    { class: "tile", key: name },
    spark(values),
    h("div", { class: "tile-name" }, name),
    h("div", { class: "tile-value" }, value),
    h("div", { class: "tile-under" }, under),
  );
}

function spark(values) {
  const known = values.filter((value) => value !== null);
  if (known.length < 2) return null;
  const most = Math.max(...known, 1e-9);
  const step = 100 / (values.length - 1);
  const points = values.map((value, at) => (value === null ? null : `${(at * step).toFixed(1)},${(29 - 27 * (value / most)).toFixed(1)}`)).filter((one) => one !== null);
  const first = points[0].split(",")[0];
  const last = points.at(-1).split(",")[0];
  return h(
    "svg",
    { class: "spark", viewBox: "0 0 100 30", preserveAspectRatio: "none", "aria-hidden": "true" },
    h("polygon", { points: `${first},30 ${points.join(" ")} ${last},30` }),
    h("polyline", { points: points.join(" ") }),
  );
}

export function request(id, text) {
  return h("a", { class: "id", href: `#/request/${encodeURIComponent(id)}` }, text ?? id);
}

export function table(caption, heads, rows, props = {}) {
  return h(
    "div",
    { class: "scroll", tabindex: "0", role: "group", "aria-label": caption },
    h(
      "table",
      { class: props.class },
      h("caption", { class: "unseen" }, caption),
      h("thead", {}, h("tr", {}, heads.map((head) => h("th", { scope: "col", key: head[0], class: head[1] ?? null }, head[0])))),
      h("tbody", {}, rows),
    ),
  );
}
