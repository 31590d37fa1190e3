// Small helpers that the parts of the page share.

const SVG = "http://www.w3.org/2000/svg";

export const byId = (id) => document.getElementById(id);

function build(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (value !== null && value !== false) node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children);
  return node;
}

export const html = (tag, attributes = {}, ...children) => build(document.createElement(tag), attributes, children);
export const svg = (tag, attributes = {}, ...children) => build(document.createElementNS(SVG, tag), attributes, children);

/** The answer to a request as JSON; its error message, meant for people, is thrown. */
export async function ask(address, options = {}) {
  const answer = await request(address, options);
  return answer.json();
}

export async function request(address, { json, ...options } = {}) {
  if (json !== undefined) {
    options = { ...options, method: "POST", body: JSON.stringify(json), headers: { "Content-Type": "application/json" } };
  }
  let answer;
  try {
    answer = await fetch(address, options);
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Error("The server does not answer. Is `inline explore` still running?");
  }
  if (!answer.ok) {
    const { error } = await answer.json().catch(() => ({ error: `error ${answer.status}` }));
    throw new Error(error);
  }
  return answer;
}

/** "InLine" for inline, "Softmax" for softmax. */
export const titleOf = (kind) => (kind === "inline" ? "InLine" : kind[0].toUpperCase() + kind.slice(1));

/** 0.3137 → "31", −0.002 → "0", 123.4 → "1e4": never wider than a column of the table. */
export function percent(value) {
  if (!Number.isFinite(value)) return number(value);
  const hundredths = 100 * value;
  const text = Math.abs(hundredths) < 1000 ? hundredths.toFixed(0) : hundredths.toExponential(0).replace("+", "");
  return text.replace(/^-0$/, "0").replaceAll("-", "−");
}

/** 0.3137 → "0.31", 0.00071 → "7.1e−4"; minus signs as in print. */
export function number(value, digits = 2) {
  if (!Number.isFinite(value)) return Number.isNaN(value) ? "none" : value > 0 ? "∞" : "−∞";
  const size = Math.abs(value);
  const fixed = size === 0 || (size >= 10 ** -digits && size < 1e4);
  return (fixed ? value.toFixed(digits) : value.toExponential(1)).replaceAll("-", "−");
}
