// What is on the page, made from descriptions: h() describes an element, render() makes the page like its description and
// keeps the elements that are there already, so that focus, hover and scrolling survive an update every second.
//
// Text becomes text nodes, always. There is no way from a string to markup in here.

const SVG = new Set(["svg", "g", "rect", "line", "path", "circle", "polyline", "polygon", "defs", "marker", "text", "title"]);
const KEY = Symbol("key");
const HEARS = Symbol("hears");
const STYLED = Symbol("styled");
const THEIRS = new Set(["style", "open"]); // of an element's attributes: set by look() below, and by who opens a <details>

export function h(tag, props, ...children) {
  return { tag, props: props ?? {}, children: children.flat(Infinity).filter((one) => one !== null && one !== undefined && one !== false) };
}

export function render(parent, children) {
  const wanted = [children].flat(Infinity).filter((one) => one !== null && one !== undefined && one !== false);
  const keyed = new Map();
  const rest = [];
  for (const node of parent.childNodes) {
    if (node[KEY] !== undefined) keyed.set(node[KEY], node);
    else rest.push(node);
  }
  let place = parent.firstChild;
  for (const one of wanted) {
    const node = like(one, keyed, rest, parent);
    if (node === place) place = place.nextSibling;
    else parent.insertBefore(node, place);
  }
  while (place !== null) {
    const next = place.nextSibling;
    place.remove();
    place = next;
  }
}

// An element that is there already, made like its description, or a new one.
function like(one, keyed, rest, parent) {
  if (typeof one !== "object") {
    const at = rest.findIndex((node) => node.nodeType === Node.TEXT_NODE);
    const text = at < 0 ? document.createTextNode("") : rest.splice(at, 1)[0];
    if (text.data !== String(one)) text.data = String(one);
    return text;
  }
  const key = one.props.key;
  let node = null;
  if (key !== undefined) {
    node = keyed.get(key) ?? null;
    keyed.delete(key);
  } else {
    const at = rest.findIndex((old) => old.nodeName.toLowerCase() === one.tag);
    if (at >= 0) node = rest.splice(at, 1)[0];
  }
  if (node === null || node.nodeName.toLowerCase() !== one.tag) node = made(one.tag, parent);
  if (key !== undefined) node[KEY] = key;
  dress(node, one.props);
  render(node, one.children);
  return node;
}

function made(tag, parent) {
  const drawn = tag === "svg" || (SVG.has(tag) && parent.namespaceURI === "http://www.w3.org/2000/svg");
  return drawn ? document.createElementNS("http://www.w3.org/2000/svg", tag) : document.createElement(tag);
}

function dress(node, props) {
  const { key, style, on, ...attributes } = props;
  for (const { name } of [...node.attributes]) {
    if (!THEIRS.has(name) && attributes[name] === undefined) node.removeAttribute(name);
  }
  for (const [name, value] of Object.entries(attributes)) {
    const wanted = value === true ? "" : value;
    if (value === false || value === null || value === undefined) node.removeAttribute(name);
    else if (node.getAttribute(name) !== String(wanted)) node.setAttribute(name, String(wanted));
  }
  look(node, style ?? {});
  hear(node, on ?? {});
}

function look(node, wanted) {
  for (const name of node[STYLED] ?? []) {
    if (wanted[name] === undefined) node.style.removeProperty(name);
  }
  node[STYLED] = Object.keys(wanted);
  for (const [name, value] of Object.entries(wanted)) {
    if (node.style.getPropertyValue(name) !== String(value)) node.style.setProperty(name, String(value));
  }
}

function hear(node, wanted) {
  const heard = (node[HEARS] ??= new Map());
  for (const [name, listener] of heard) {
    if (wanted[name] !== listener) {
      node.removeEventListener(name, listener);
      heard.delete(name);
    }
  }
  for (const [name, listener] of Object.entries(wanted)) {
    if (heard.get(name) !== listener) {
      node.addEventListener(name, listener);
      heard.set(name, listener);
    }
  }
}
