// Part three: what the three attentions cost against resolution.

import { KINDS } from "./attention.js";
import { ask, byId, html, request, svg, titleOf } from "./dom.js";

const METRICS = {
  macs: { title: "GMACs", get: (row) => row.macs / 1e9 },
  memory: { title: "MB", get: (row) => row.activation_bytes / 1e6 },
  time: { title: "ms", get: (row) => (row.seconds === undefined ? null : row.seconds * 1e3) },
};

let sizes = [];
let rows = []; // {kind, size, tokens, macs, activation_bytes, seconds once measured}
let running = null; // the AbortController of a measurement

export function startCost(tab) {
  tab.addEventListener("show", load, { once: true });
  byId("cost-metric").addEventListener("change", draw);
  byId("cost-measure").addEventListener("click", measure);
  byId("cost-cancel").addEventListener("click", () => running?.abort());
}

function say(text, { error = false } = {}) {
  const status = byId("cost-status");
  status.textContent = text;
  status.classList.toggle("error", error);
}

async function load() {
  say("Counting…");
  try {
    const answer = await ask("/api/cost");
    ({ sizes, counts: rows } = answer);
    byId("cost-machine").textContent = `This machine: ${answer.machine}.`;
    byId("cost-measure").disabled = false;
    byId("cost-results").hidden = false;
    say("");
    draw();
  } catch (error) {
    say(error.message, { error: true });
    byId("tab-cost").addEventListener("show", load, { once: true });
  }
}

const metric = () => document.querySelector("#cost-metric input:checked").value;
const round = (value) => (value >= 100 ? value.toFixed(0) : value >= 10 ? value.toFixed(1) : value.toFixed(2));

function draw() {
  drawChart();
  drawTable();
}

function drawTable() {
  const head = ["side", "tokens", "attention", ...Object.values(METRICS).map(({ title }) => title)];
  const table = byId("cost-table");
  table.replaceChildren(html("thead", {}, html("tr", {}, ...head.map((text) => html("th", { scope: "col" }, text)))));
  for (const size of sizes) {
    const body = html("tbody", {});
    rows
      .filter((row) => row.size === size)
      .forEach((row, i, group) => {
        const span = { scope: "rowgroup", rowspan: group.length };
        const first = i === 0 ? [html("th", span, `${size}`), html("th", span, `${row.tokens}`)] : [];
        const values = Object.values(METRICS).map(({ get }) => (get(row) === null ? "–" : round(get(row))));
        const name = html("th", { scope: "row" }, html("span", { class: `kind ${row.kind}` }, titleOf(row.kind)));
        body.append(html("tr", {}, ...first, name, ...values.map((value) => html("td", {}, value))));
      });
    table.append(body);
  }
}

const WIDTH = 560;
const HEIGHT = 400;
const MARGIN = { left: 66, right: 104, top: 46, bottom: 62 };

function drawChart() {
  const { title, get } = METRICS[metric()];
  const chart = byId("cost-chart");
  chart.setAttribute("viewBox", `0 0 ${WIDTH} ${HEIGHT}`);
  chart.replaceChildren();
  const known = rows.filter((row) => get(row) !== null);
  if (known.length === 0) {
    const text = rows.length ? "Not measured yet: press “Measure the time”." : "";
    chart.append(svg("text", { x: WIDTH / 2, y: HEIGHT / 2, "text-anchor": "middle" }, text));
    return;
  }
  // Both axes logarithmic: a power of the side is a straight line.
  const place = (value, low, high, from, to) => from + ((Math.log(value) - Math.log(low)) / (Math.log(high) - Math.log(low))) * (to - from);
  const values = known.map(get);
  const low = 10 ** Math.floor(Math.log10(Math.min(...values)));
  const high = 10 ** Math.ceil(Math.log10(Math.max(...values) * 1.001));
  const x = (size) => place(size, sizes[0], sizes.at(-1), MARGIN.left, WIDTH - MARGIN.right);
  const y = (value) => place(value, low, high, HEIGHT - MARGIN.bottom, MARGIN.top);
  for (let tick = low; tick <= high * 1.001; tick *= 10) {
    chart.append(svg("line", { class: "gridline", x1: MARGIN.left, x2: WIDTH - MARGIN.right, y1: y(tick), y2: y(tick) }));
    chart.append(svg("text", { x: MARGIN.left - 8, y: y(tick) + 4, "text-anchor": "end" }, `${Number(tick.toPrecision(1))}`));
  }
  for (const size of sizes) {
    chart.append(svg("text", { x: x(size), y: HEIGHT - MARGIN.bottom + 30, "text-anchor": "middle" }, `${size}`));
  }
  chart.append(svg("text", { x: 2, y: MARGIN.top - 28 }, title));
  chart.append(svg("text", { x: (MARGIN.left + WIDTH - MARGIN.right) / 2, y: HEIGHT - 6, "text-anchor": "middle" }, "side of the image in pixels"));
  const labels = [];
  for (const kind of KINDS) {
    const line = known.filter((row) => row.kind === kind);
    if (line.length === 0) continue;
    chart.append(svg("polyline", { class: kind, points: line.map((row) => `${x(row.size)},${y(get(row))}`).join(" ") }));
    for (const row of line) {
      const dot = svg("circle", { class: kind, cx: x(row.size), cy: y(get(row)), r: 4 });
      dot.append(svg("title", {}, `${titleOf(kind)} at ${row.size}: ${round(get(row))} ${title}`));
      chart.append(dot);
    }
    labels.push({ kind, at: y(get(line.at(-1))) + 4, x: x(line.at(-1).size) + 10 });
  }
  // Names beside the ends of lines, pushed apart where lines end together.
  labels.sort((p, q) => p.at - q.at);
  labels.forEach((label, i) => {
    if (i > 0) label.at = Math.max(label.at, labels[i - 1].at + 22);
    chart.append(svg("text", { class: label.kind, x: label.x, y: label.at }, titleOf(label.kind)));
  });
}

async function measure() {
  running = new AbortController();
  const [button, cancel, progress] = ["cost-measure", "cost-cancel", "cost-progress"].map(byId);
  document.querySelector("#cost-metric [value=time]").checked = true;
  for (const row of rows) delete row.seconds;
  button.disabled = true;
  cancel.hidden = progress.hidden = false;
  progress.value = 0;
  say("Measuring…");
  draw();
  try {
    const answer = await request("/api/measure", { json: {}, signal: running.signal });
    let outcome = "The measurement ended early; the server's terminal may show why.";
    let text = "";
    const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
    for (let part = await reader.read(); !part.done; part = await reader.read()) {
      text += part.value;
      const lines = text.split("\n");
      text = lines.pop();
      for (const event of lines.map((line) => JSON.parse(line))) {
        progress.max = event.total;
        progress.value = event.done;
        if (event.done === event.total) outcome = "Measured.";
        const row = rows.find(({ kind, size }) => kind === event.kind && size === event.size);
        if (row) row.seconds = event.median;
        if (event.stopped) outcome = event.stopped;
      }
      draw();
    }
    say(outcome);
  } catch (error) {
    if (error.name === "AbortError") say("Stopped; the results so far are kept.");
    else say(error.message, { error: true });
  } finally {
    running = null;
    button.disabled = false;
    cancel.hidden = progress.hidden = true;
  }
}
