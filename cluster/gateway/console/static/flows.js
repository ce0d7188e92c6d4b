// Who pushes KV to whom: nodes on a circle, an arc for each pair that ever moved bytes, as wide as it is busy.

import { h } from "./dom.js";
import { byteRate, bytes } from "./format.js";
import { table } from "./parts.js";

const MOST = 24; // nodes that are drawn

export function flows(data) {
  const names = [...new Set(data.members.map((one) => one.node))].sort((a, b) => a.localeCompare(b, "en", { numeric: true }));
  const links = data.links.filter((one) => one.source && one.source !== one.target);
  const total = data.carriers.map((one) => h("li", { key: one.carrier }, h("span", { class: `carrier ${known(one.carrier)}` }, one.carrier), h("b", {}, byteRate(one.rate)), h("small", {}, `${bytes(one.bytes)} in all`)));
  return [
    names.length > 1 && names.length <= MOST ? picture(names, links) : null,
    total.length ? h("ul", { class: "rows carriers" }, total) : h("p", { class: "empty" }, "No KV has moved yet."),
    links.length ? h("details", {}, h("summary", {}, "Every pair of nodes"), table("KV pushed from node to node", [["from"], ["to"], ["carrier"], ["now", "number"], ["in all", "number"]], links.slice(0, 200).map(row))) : null,
  ];
}

function known(carrier) {
  return ["ucx", "ucxx", "tcp", "segment"].includes(carrier) ? carrier : "other";
}

function row(link) {
  return h(
    "tr",
    { key: `${link.source} ${link.target} ${link.carrier}` },
    [link.source, link.target, link.carrier].map((text) => h("td", {}, text)),
    h("td", { class: "number" }, byteRate(link.rate)),
    h("td", { class: "number" }, bytes(link.bytes)),
  );
}

function picture(names, links) {
  const flat = names.length === 2;
  const height = flat ? 130 : 250;
  const at = new Map(names.map((name, i) => [name, spot(i, names.length, flat)]));
  const busiest = Math.max(...links.map((one) => one.rate ?? 0), 1);
  const said = links.map((one) => `${one.source} to ${one.target} by ${one.carrier}, ${byteRate(one.rate)}`).join("; ");
  return h(
    "svg",
    { class: "flows", viewBox: `0 0 420 ${height}`, role: "img", "aria-label": said || "No KV moves between nodes" },
    links.filter((one) => at.has(one.source) && at.has(one.target)).map((one, i) => arc(one, at, busiest, flat, i)),
    names.map((name) => {
      const [x, y] = at.get(name);
      return h("g", { key: `node ${name}` }, h("circle", { cx: x, cy: y, r: names.length > 10 ? 15 : 24, class: "place" }), h("text", { x, y: y + 5, "text-anchor": "middle", class: "place-name" }, name.slice(0, 6)));
    }),
  );
}

function spot(i, n, flat) {
  if (flat) return [i === 0 ? 70 : 350, 65];
  const turn = (2 * Math.PI * i) / n - Math.PI / 2;
  return [210 + 150 * Math.cos(turn), 125 + 92 * Math.sin(turn)];
}

function arc(link, at, busiest, flat, i) {
  const [x1, y1] = at.get(link.source);
  const [x2, y2] = at.get(link.target);
  const far = Math.hypot(x2 - x1, y2 - y1) || 1;
  const [dx, dy] = [(x2 - x1) / far, (y2 - y1) / far];
  const bend = flat ? 38 : 20; // to its own left, so that there and back do not meet
  const [mx, my] = [(x1 + x2) / 2 + dy * bend, (y1 + y2) / 2 - dx * bend];
  const begin = edge([x1, y1], [mx, my], 27);
  const end = edge([x2, y2], [mx, my], 32);
  const busy = (link.rate ?? 0) > 0;
  const width = busy ? 1.5 + 5 * Math.sqrt(link.rate / busiest) : 1.2;
  const path = `M${begin} Q${mx.toFixed(1)},${my.toFixed(1)} ${end}`;
  const shown = busy ? byteRate(link.rate) : bytes(link.bytes);
  return h(
    "g",
    { key: `${link.source} ${link.target} ${link.carrier}`, class: `flow ${known(link.carrier)} ${busy ? "busy" : "idle"}` },
    h("title", {}, `${link.source} to ${link.target} by ${link.carrier}: ${byteRate(link.rate)}, ${bytes(link.bytes)} in all`),
    h("path", { d: path, "stroke-width": width.toFixed(2), class: "way" }),
    busy ? h("path", { d: path, "stroke-width": Math.max(1.4, width * 0.5).toFixed(2), class: "drops" }) : null,
    head(end, [mx, my], width),
    flat || busy ? label(`${link.carrier} ${shown}`, [(x1 + x2 + 2 * mx) / 4 + dy * 13, (y1 + y2 + 2 * my) / 4 - dx * 13], dy) : null,
  );
}

// On the outer side of its arc, away from the line.
function label(text, [x, y], side) {
  const anchor = Math.abs(side) < 0.4 ? "middle" : side > 0 ? "start" : "end";
  return h("text", { x: x.toFixed(1), y: (y + 4).toFixed(1), "text-anchor": anchor, class: "amount" }, text);
}

function edge([x, y], [mx, my], r) {
  const far = Math.hypot(mx - x, my - y) || 1;
  return `${(x + ((mx - x) / far) * r).toFixed(1)},${(y + ((my - y) / far) * r).toFixed(1)}`;
}

function head(end, [mx, my], width) {
  const [x, y] = end.split(",").map(Number);
  const far = Math.hypot(x - mx, y - my) || 1;
  const [ux, uy] = [(x - mx) / far, (y - my) / far];
  const size = 5 + width;
  const points = [
    [x + ux * size, y + uy * size],
    [x - uy * size * 0.6, y + ux * size * 0.6],
    [x + uy * size * 0.6, y - ux * size * 0.6],
  ];
  return h("polygon", { points: points.map((point) => point.map((one) => one.toFixed(1)).join(",")).join(" "), class: "head" });
}
