// Part one: queries and keys in the plane, and the weights that the three attention functions make of them.

import { KERNELS, KINDS, closestPair, equalGroups, weights } from "./attention.js";
import { byId, html, number, percent, svg, titleOf } from "./dom.js";

const EXTENT = 2.75; // the plane from −EXTENT to EXTENT
const UNIT = 100; // SVG units of one
const STEP = 0.05; // of an arrow key
const SUBSCRIPTS = "₁₂₃₄";

/** Arrangements to start from, made of the library's figure: see `plane` in app.py. */
function makePresets({ relu, relu_affine }) {
  const around = (degrees) => [Math.cos, Math.sin].map((f) => 1.6 * f((degrees * Math.PI) / 180));
  return {
    collinear: { label: "Collinear queries", kernel: "relu", together: true, ...relu },
    affine: { label: "Collinear behind A·x + b", kernel: "relu_affine", together: false, ...relu_affine },
    directions: {
      label: "Different directions",
      kernel: "relu",
      together: false,
      queries: [20, 40, 60, 80].map(around),
      keys: relu.keys,
    },
    merged: {
      label: "Merged by ReLU",
      kernel: "relu",
      together: false,
      queries: [[-0.5, 1.3], [-1.8, 1.3], [0.8, 1.3], [1.6, 1.3]],
      keys: relu.keys,
    },
  };
}

let presets;
let figure; // what the library's figure holds
const state = { queries: [], keys: [], kernel: "relu", together: false, affine: null };
const points = []; // {list, index, name, node, arrow, label}
const cells = {}; // kind → one per query: {bars, numbers, node}

const clamp = (x) => Math.min(EXTENT, Math.max(-EXTENT, x));
const toScreen = ([x, y]) => [x * UNIT, -y * UNIT];

export function startPlane(given) {
  figure = given;
  presets = makePresets(given);
  drawAxes();
  for (const [list, letter] of [["keys", "k"], ["queries", "q"]]) {
    for (let index = 0; index < 4; index++) points.push(makePoint(list, index, letter));
  }
  const plane = byId("plane-svg");
  plane.append(...points.map((point) => point.arrow), ...points.map((point) => point.node));
  followPointer(plane);
  buildTable();
  buildControls();
  usePreset("collinear");
}

function drawAxes() {
  const size = EXTENT * UNIT;
  const plane = byId("plane-svg");
  plane.setAttribute("viewBox", `${-size} ${-size} ${2 * size} ${2 * size}`);
  const grid = svg("g", { class: "grid", "aria-hidden": "true" });
  for (let at = -2; at <= 2; at++) {
    const place = at * UNIT;
    const kind = at === 0 ? "axis" : "";
    grid.append(svg("line", { class: kind, x1: place, x2: place, y1: -size, y2: size }));
    grid.append(svg("line", { class: kind, y1: place, y2: place, x1: -size, x2: size }));
    if (at !== 0) {
      grid.append(svg("text", { x: place, y: 16, "text-anchor": "middle" }, number(at, 0)));
      grid.append(svg("text", { x: -7, y: -place + 4, "text-anchor": "end" }, number(at, 0)));
    }
  }
  plane.append(grid);
}

function makePoint(list, index, letter) {
  const name = letter + SUBSCRIPTS[index];
  const mark = list === "queries" ? svg("circle", { r: 9 }) : svg("rect", { x: -8, y: -8, width: 16, height: 16, rx: 3 });
  const label = svg("text", { x: 14, y: -10 }, name);
  const node = svg(
    "g",
    {
      class: `point ${list}`,
      id: `point-${letter}${index + 1}`,
      tabindex: 0,
      role: "slider",
      "aria-roledescription": "point in the plane",
      "aria-label": `${list === "queries" ? "query" : "key"} ${index + 1}`,
      "aria-valuemin": -EXTENT,
      "aria-valuemax": EXTENT,
    },
    svg("circle", { class: "reach", r: 24 }),
    mark,
    label,
  );
  const arrow = svg("line", { class: `arrow ${list}`, x1: 0, y1: 0 });
  node.addEventListener("keydown", (event) => {
    const direction = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, 1], ArrowDown: [0, -1] }[event.key];
    if (!direction) return;
    event.preventDefault();
    const step = event.shiftKey ? 5 * STEP : STEP;
    move(list, index, state[list][index].map((x, i) => x + step * direction[i]));
  });
  return { list, index, name, node, arrow, label };
}

/** Dragging takes hold of the nearest point, because the areas around points overlap. */
function followPointer(plane) {
  let held = null;
  const placeOf = (event) => {
    const { x, y } = new DOMPoint(event.clientX, event.clientY).matrixTransform(plane.getScreenCTM().inverse());
    return [x / UNIT, -y / UNIT];
  };
  plane.addEventListener("pointerdown", (event) => {
    if (!event.target.closest(".point")) return;
    const [x, y] = placeOf(event);
    const distances = points.map(({ list, index }) => Math.hypot(state[list][index][0] - x, state[list][index][1] - y));
    held = points[distances.indexOf(Math.min(...distances))];
    plane.setPointerCapture(event.pointerId);
    held.node.focus({ preventScroll: true });
    event.preventDefault();
  });
  plane.addEventListener("pointermove", (event) => {
    if (held) move(held.list, held.index, placeOf(event));
  });
  for (const end of ["pointerup", "pointercancel"]) plane.addEventListener(end, () => (held = null));
}

/** Moves a point, and with it all queries, which keep their lengths, while they are to stay on one line. */
function move(list, index, to) {
  const target = to.map(clamp);
  if (list === "queries" && state.together) {
    const length = Math.hypot(...target);
    if (length < 1e-3) return;
    state.queries = state.queries.map((query, i) => {
      const own = i === index ? length : Math.hypot(...query);
      return target.map((x) => (x / length) * own);
    });
    // A long query that turns away from a corner would leave the plane.
    state.queries = state.queries.map((query) => {
      const excess = Math.max(1, ...query.map((x) => Math.abs(x) / EXTENT));
      return query.map((x) => x / excess);
    });
  } else {
    state[list][index] = target;
  }
  byId("plane-preset").value = "";
  scheduleRender();
}

function buildControls() {
  const preset = byId("plane-preset");
  preset.append(html("option", { value: "", hidden: true }, "own arrangement"));
  for (const [value, { label }] of Object.entries(presets)) preset.append(html("option", { value }, label));
  preset.addEventListener("change", () => usePreset(preset.value));
  const kernel = byId("plane-kernel");
  for (const [value, { label }] of Object.entries(KERNELS)) kernel.append(html("option", { value }, label));
  kernel.addEventListener("change", () => {
    state.kernel = kernel.value;
    render();
  });
  const together = byId("plane-together");
  together.addEventListener("change", () => {
    state.together = together.checked;
    if (state.together) move("queries", 3, state.queries[3]);
  });
  for (const [id, row, column] of [["a11", 0, 0], ["a12", 0, 1], ["a21", 1, 0], ["a22", 1, 1]]) {
    bindNumber(byId(id), () => state.affine.A[row][column], (x) => (state.affine.A[row][column] = x));
  }
  for (const [id, row] of [["b1", 0], ["b2", 1]]) {
    bindNumber(byId(id), () => state.affine.b[row], (x) => (state.affine.b[row] = x));
  }
  const body = byId("coordinates");
  for (const { list, index, name } of points.toSorted((p, q) => p.name.localeCompare(q.name))) {
    const inputs = [0, 1].map((axis) => {
      const input = html("input", { type: "number", step: STEP, "aria-label": `${name}, ${"xy"[axis]}` });
      bindNumber(input, () => state[list][index][axis], (x) => {
        const to = [...state[list][index]];
        to[axis] = x;
        move(list, index, to);
      });
      return html("td", {}, input);
    });
    body.append(html("tr", {}, html("th", { scope: "row" }, name), ...inputs));
  }
}

const bound = []; // number fields and what they show

function bindNumber(input, get, set) {
  input.addEventListener("change", () => {
    if (Number.isFinite(input.valueAsNumber)) set(input.valueAsNumber);
    render();
  });
  bound.push({ input, get });
}

function usePreset(name) {
  const preset = presets[name];
  state.queries = preset.queries.map((point) => point.map(clamp));
  state.keys = preset.keys.map((point) => [...point]);
  state.kernel = preset.kernel;
  state.together = preset.together;
  state.affine = structuredClone(figure.affine);
  byId("plane-preset").value = name;
  render();
}

function buildTable() {
  const table = byId("plane-weights");
  table.append(html("span", { class: "corner", "aria-hidden": "true" }));
  for (const kind of KINDS) {
    table.append(html("h3", { class: `kind ${kind}` }, titleOf(kind)));
  }
  for (const kind of KINDS) cells[kind] = [];
  for (let query = 0; query < 4; query++) {
    table.append(html("span", { class: "query" }, `q${SUBSCRIPTS[query]}`));
    for (const kind of KINDS) {
      const bars = [0, 1, 2, 3].map(() => html("span", { class: "bar" }));
      const numbers = [0, 1, 2, 3].map(() => html("span", { class: "weight" }));
      const columns = bars.map((bar, i) => html("span", { class: "column" }, html("span", { class: "track" }, bar), numbers[i]));
      const node = html("div", { class: `row ${kind}`, role: "img", id: `row-${kind}-${query + 1}` }, ...columns);
      cells[kind].push({ bars, numbers, node });
      table.append(node);
    }
  }
}

let scheduled = false;

function scheduleRender() {
  if (scheduled) return;
  scheduled = true;
  requestAnimationFrame(() => {
    scheduled = false;
    render();
  });
}

function render() {
  for (const { list, index, name, node, arrow, label } of points) {
    const at = state[list][index];
    const [x, y] = toScreen(at);
    node.setAttribute("transform", `translate(${x} ${y})`);
    node.setAttribute("aria-valuenow", at[0].toFixed(2));
    node.setAttribute("aria-valuetext", `${name} at ${number(at[0])}, ${number(at[1])}`);
    arrow.setAttribute("x2", x);
    arrow.setAttribute("y2", y);
    label.setAttribute("x", x > (EXTENT - 0.3) * UNIT ? -32 : 14);
    label.setAttribute("y", y < -(EXTENT - 0.25) * UNIT ? 24 : -10);
  }
  byId("plane-kernel").value = state.kernel;
  byId("plane-together").checked = state.together;
  byId("affine").hidden = state.kernel !== "relu_affine";
  for (const { input, get } of bound) {
    if (document.activeElement !== input) input.value = Math.round(get() * 1000) / 1000;
  }
  const phi = KERNELS[state.kernel].make(state.affine);
  const rows = Object.fromEntries(KINDS.map((kind) => [kind, weights(kind, state.queries, state.keys, phi)]));
  drawBars(rows);
  for (const kind of KINDS) byId(`verdict-${kind}`).replaceChildren(...verdict(kind, rows[kind], phi));
}

function drawBars(rows) {
  // One scale for all bars. A larger weight, from a division by almost zero, is cut off.
  const all = Object.values(rows).flat(2).filter(Number.isFinite);
  const top = Math.min(1.5, Math.max(0.5, ...all));
  const bottom = Math.max(-1.5, Math.min(0, ...all));
  const span = top - bottom;
  for (const kind of KINDS) {
    const groups = equalGroups(rows[kind], figure.tolerance);
    rows[kind].forEach((row, query) => {
      const { bars, numbers, node } = cells[kind][query];
      row.forEach((weight, key) => {
        const shown = Math.min(top, Math.max(bottom, Number.isFinite(weight) ? weight : 0));
        const bar = bars[key];
        bar.style.bottom = `${(100 * (Math.min(shown, 0) - bottom)) / span}%`;
        bar.style.height = `${(100 * Math.abs(shown)) / span}%`;
        bar.classList.toggle("negative", weight < 0);
        bar.classList.toggle("cut", shown !== weight);
        numbers[key].textContent = percent(weight);
      });
      node.style.setProperty("--zero", `${(100 * -bottom) / span}%`);
      node.classList.toggle("same", groups.some((group) => group.includes(query)));
      const spoken = row.map((weight, key) => `k${key + 1} ${number(weight)}`).join(", ");
      node.setAttribute("aria-label", `${titleOf(kind)}, query ${query + 1}: ${spoken}`);
    });
  }
}

const listing = (group) => new Intl.ListFormat("en").format(group.map((i) => `q${SUBSCRIPTS[i]}`));

function verdict(kind, rows, phi) {
  const notes = [];
  const groups = equalGroups(rows, figure.tolerance);
  if (groups.length === 0) {
    const [i, j, difference] = closestPair(rows);
    notes.push(html("strong", { class: "good" }, "Tells all queries apart. "));
    notes.push(`The closest, ${listing([i, j])}, differ by ${number(difference, 3)}.`);
  } else {
    notes.push(html("strong", { class: "bad" }, `Same weights for ${groups.map(listing).join(", and for ")}. `));
    notes.push(reason(kind, groups, phi));
  }
  const largest = Math.max(...rows.flat().map(Math.abs));
  if (!(largest < 10)) notes.push(html("strong", { class: "bad" }, ` Divides by almost zero: weights of ${number(largest, 0)}.`));
  return notes;
}

/** Why these groups of queries have the same weights. */
function reason(kind, groups, phi) {
  const within = (others) => groups.every((group) => others.some((other) => group.every((i) => other.includes(i))));
  if (within(equalGroups(state.queries, figure.tolerance))) return "They are the same point.";
  if (kind !== "softmax" && within(equalGroups(state.queries.map(phi), figure.tolerance))) return "φ itself makes one point of them.";
  if (kind === "linear") return "Their φ(q) lie on one line through the origin, and the division cancels their lengths.";
  return kind === "softmax" ? "The keys lie on one line." : "The φ of the keys lie on one line.";
}
