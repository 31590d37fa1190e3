// Part two: what a chosen token of a picture attends to, in a layer and head of each model.

import { ask, byId, html, number, titleOf } from "./dom.js";

const POSITIVE = [178, 24, 43];
const NEGATIVE = [33, 102, 172];
const PIXELS = 448; // a side of a canvas

const state = { picture: null, layer: 0, x: 0.5, y: 0.5, residual: false, reference: "zero" };
const panels = [];
let maxBytes;
let photo = null; // the picture as an <img>

export function startImage(setup) {
  maxBytes = setup.max_bytes;
  const random = setup.models.filter((model) => !model.weights);
  if (random.length > 0) {
    const names = new Intl.ListFormat("en").format(random.map((model) => titleOf(model.kind)));
    const notice = byId("image-random");
    notice.append(
      html("strong", {}, `${names}: random weights. `),
      "Maps of untrained models are nearly uniform and mean little. Trained ones: ",
      html("code", {}, "inline explore --weights FILE…"),
      ", files that ",
      html("code", {}, "inline train"),
      " wrote.",
    );
    notice.hidden = false;
  }
  // Weights that all are nearly 1/N would make one colour of each map.
  state.reference = random.length === setup.models.length ? "uniform" : "zero";
  buildPanels(setup.models);
  buildControls(setup);
  usePicture(setup.photos[0].picture);
}

function say(text, { error = false } = {}) {
  const status = byId("image-status");
  status.textContent = text;
  status.classList.toggle("error", error);
}

function buildControls({ photos, models }) {
  for (const { picture, title } of photos) {
    const button = html(
      "button",
      { type: "button", "data-picture": picture, "aria-label": title, onclick: () => usePicture(picture) },
      html("img", { src: `/pictures/${picture}`, alt: "" }),
    );
    byId("image-samples").append(button);
  }
  byId("image-credit").textContent = `Photographs: ${photos.map(({ title }) => title).join("; ")}. Pictures are cut to their centre square.`;
  const file = byId("image-file");
  file.addEventListener("change", () => {
    if (file.files.length > 0) upload(file.files[0]);
    file.value = ""; // so that the same file can be chosen again
  });
  const tab = byId("image");
  tab.addEventListener("dragover", (event) => {
    event.preventDefault();
    tab.classList.add("dropping");
  });
  tab.addEventListener("dragleave", () => tab.classList.remove("dropping"));
  tab.addEventListener("drop", (event) => {
    event.preventDefault();
    tab.classList.remove("dropping");
    if (event.dataTransfer.files.length > 0) upload(event.dataTransfer.files[0]);
  });
  const layer = byId("image-layer");
  layer.max = Math.max(...models.map((model) => model.layers));
  layer.value = state.layer + 1;
  layer.addEventListener("input", () => {
    state.layer = layer.valueAsNumber - 1;
    update();
  });
  const reference = byId("image-reference");
  reference.value = state.reference;
  reference.addEventListener("change", () => {
    state.reference = reference.value;
    drawAll();
  });
  byId("image-residual").addEventListener("change", (event) => {
    state.residual = event.target.checked;
    drawAll();
  });
}

function buildPanels(models) {
  panels.push(makePanel({ title: html("h2", {}, "Picture"), name: "Picture" }));
  for (const [index, model] of models.entries()) {
    const name = model.title ?? titleOf(model.kind);
    const title = html("h2", { class: `kind ${model.kind}` }, name);
    const head = html("select", { "aria-label": `Head of ${name}` }, html("option", { value: "" }, "mean of heads"));
    const panel = makePanel({ title, name, model: { ...model, index }, head });
    head.addEventListener("change", () => refresh(panel));
    panels.push(panel);
  }
  byId("image-panels").append(...panels.map((panel) => panel.node));
}

function makePanel({ title, name, model = null, head = null }) {
  const canvas = html("canvas", {
    width: PIXELS,
    height: PIXELS,
    tabindex: 0,
    role: "slider",
    "aria-roledescription": "token chooser",
    "aria-label": model ? `Attention map, ${name}` : "Token of the picture",
    "aria-valuenow": 0,
  });
  const facts = html("p", { class: "facts" }, model ? "Computing…" : "");
  const node = html("article", { class: "card panel", "data-kind": model?.kind ?? "picture" }, html("header", {}, title));
  if (head) node.firstChild.append(head);
  node.append(canvas);
  const guesses = html("ol", { class: "guesses", "aria-label": `Prediction, ${name}` });
  if (model) {
    node.append(guesses, facts, html("p", {}, ...describe(model)));
  } else {
    node.append(facts);
  }
  const panel = { node, canvas, model, head, facts, guesses, map: null, asking: false, outdated: false };
  const choose = (event) => {
    const box = canvas.getBoundingClientRect();
    select((event.clientX - box.left) / box.width, (event.clientY - box.top) / box.height);
  };
  canvas.addEventListener("pointerdown", (event) => {
    canvas.setPointerCapture(event.pointerId);
    choose(event);
  });
  canvas.addEventListener("pointermove", (event) => {
    if (canvas.hasPointerCapture(event.pointerId)) choose(event);
  });
  canvas.addEventListener("keydown", (event) => {
    const direction = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] }[event.key];
    if (!direction) return;
    event.preventDefault();
    const [height, width] = queryGrid();
    select(state.x + direction[0] / width, state.y + direction[1] / height);
  });
  return panel;
}

/** The file of the weights, which may break before its suffix, after the model unless the file is named like it. */
function describe({ name, kind, weights }) {
  const source = weights?.split(/(?=\.)/).flatMap((part) => [html("wbr"), part]);
  if (weights?.startsWith(`${name}.`)) return source;
  const model = name.startsWith(kind) ? name : `${name}, ${kind} attention`;
  return [`${model} · `, ...(source ?? [html("span", { class: "badge" }, "random weights")])];
}

/** Of the finest map: arrow keys then reach every token of every model. */
function queryGrid() {
  const grids = panels.filter((panel) => panel.map).map((panel) => panel.map.query_grid);
  return grids.sort((p, q) => q[0] - p[0])[0] ?? [14, 14];
}

function select(x, y) {
  const inside = (value) => Math.min(0.999, Math.max(0, value));
  const [height, width] = queryGrid();
  // The middle of the token, from which steps of a token lead to the middle of others.
  const middle = (value, count) => (Math.floor(inside(value) * count) + 0.5) / count;
  const [newX, newY] = [middle(x, width), middle(y, height)];
  if (newX === state.x && newY === state.y) return;
  state.x = newX;
  state.y = newY;
  update();
}

/** Shows a picture and asks for its maps; false if the server has it no longer. */
async function usePicture(picture) {
  const image = new Image();
  image.src = `/pictures/${picture}`;
  try {
    await image.decode();
  } catch {
    say("The picture is no longer on the server; load it again.", { error: true });
    return false;
  }
  photo = image;
  state.picture = picture;
  say(""); // an error of an earlier one
  for (const button of byId("image-samples").children) {
    button.setAttribute("aria-pressed", button.dataset.picture === picture);
  }
  panels.forEach((panel) => (panel.map = null));
  update();
  panels.filter((panel) => panel.model).forEach((panel) => predict(panel, picture));
  return true;
}

/** Shows the classes that a model finds most probable, with their probabilities. */
async function predict({ guesses, model }, picture) {
  guesses.replaceChildren();
  let found;
  try {
    found = (await ask("/api/prediction", { json: { picture, model: model.index } })).guesses;
  } catch (error) {
    guesses.replaceChildren(html("li", { class: "error" }, error.message));
    return;
  }
  if (picture !== state.picture) return; // another one was chosen meanwhile
  const items = found.map(({ name, description, probability }) =>
    html(
      "li",
      {},
      html("span", { title: description || name }, description.split(",")[0] || name),
      html("meter", { min: 0, max: 1, value: probability, "aria-hidden": "true" }),
      html("b", {}, `${(100 * probability).toFixed(probability < 0.0995 ? 1 : 0)}%`),
    ),
  );
  guesses.replaceChildren(...(items.length > 0 ? items : [html("li", {}, "No prediction: random weights.")]));
}

async function upload(file) {
  if (file.size > maxBytes) {
    const most = Math.round(maxBytes / 2 ** 20);
    say(`“${file.name}” has ${(file.size / 2 ** 20).toFixed(1)} MiB; the limit is ${most} MiB.`, { error: true });
    return;
  }
  say(`Loading “${file.name}”…`);
  try {
    const { picture } = await ask("/api/pictures", {
      method: "POST",
      body: file,
      headers: { "Content-Type": "application/octet-stream" },
    });
    if (await usePicture(picture)) say(`“${file.name}” is loaded.`);
  } catch (error) {
    say(`“${file.name}”: ${error.message}`, { error: true });
  }
}

function update() {
  byId("image-layer-value").textContent = `${state.layer + 1} of ${byId("image-layer").max}`;
  panels.forEach(refresh);
}

/** Asks for a panel's map. Changes made meanwhile are answered by one more request, for the last of them. */
async function refresh(panel) {
  if (!panel.model) {
    drawAll();
    return;
  }
  panel.outdated = true;
  if (panel.asking) return;
  panel.asking = true;
  panel.node.classList.add("stale");
  while (panel.outdated) {
    panel.outdated = false;
    const { model, head } = panel;
    const layer = Math.min(state.layer, model.layers - 1);
    try {
      panel.map = await ask("/api/map", {
        json: {
          picture: state.picture,
          model: model.index,
          layer,
          head: head.value === "" ? null : Number(head.value),
          x: state.x,
          y: state.y,
        },
      });
      panel.error = null;
      offerHeads(panel);
    } catch (error) {
      panel.error = error.message;
    }
    drawAll();
  }
  panel.node.classList.remove("stale");
  panel.asking = false;
}

/** The heads of the layer, and the one that is shown: another layer may have fewer. */
function offerHeads({ head, map, outdated }) {
  if (head.options.length !== map.heads + 1) {
    head.replaceChildren(head.options[0]);
    for (let i = 0; i < map.heads; i++) head.append(html("option", { value: i }, `head ${i + 1} of ${map.heads}`));
  }
  if (!outdated) head.value = map.head ?? "";
}

/** What a panel shows: weights × N, null outside the window of the query. */
function shownWeights({ map }) {
  const weights = state.residual && map.with_local ? map.with_local : map.weights;
  return weights.map((weight) => (weight === null ? null : weight * map.tokens));
}

const centre = () => (state.reference === "uniform" ? 1 : 0);

/** How far any map is from the middle of the legend: one range for all, so that their colours compare. */
function sharedRange() {
  const shown = panels.filter((panel) => panel.map && !panel.error).flatMap(shownWeights);
  return Math.max(0, ...shown.filter((weight) => weight !== null).map((weight) => Math.abs(weight - centre()))) || 1;
}

/** Draws all panels, because a new map may change the range that all share. */
function drawAll() {
  const range = sharedRange();
  const ends = [centre() - range, centre(), centre() + range];
  [...byId("image-legend").children].forEach((label, i) => (label.textContent = number(ends[i])));
  panels.forEach((panel) => draw(panel, range));
}

function draw(panel, range) {
  const { canvas, map, model } = panel;
  const context = canvas.getContext("2d");
  if (!photo) return;
  context.globalAlpha = 1;
  context.filter = model ? "grayscale(1) contrast(0.7) brightness(1.15)" : "none";
  context.drawImage(photo, 0, 0, PIXELS, PIXELS);
  context.filter = "none";
  if (!model) {
    const [height, width] = queryGrid();
    drawGrid(context, [height, width]);
    const [row, column] = [Math.floor(state.y * height), Math.floor(state.x * width)];
    drawQuery(context, [row, column], [height, width]);
    const text = `row ${row + 1} of ${height}, column ${column + 1} of ${width}`;
    panel.facts.textContent = `Token in ${text}.`;
    panels.forEach((other) => other.canvas.setAttribute("aria-valuetext", text));
    return;
  }
  panel.facts.classList.toggle("error", Boolean(panel.error));
  panel.facts.role = panel.error ? "alert" : null;
  if (panel.error) {
    panel.facts.textContent = panel.error;
    return;
  }
  if (!map) return;
  const weights = shownWeights(panel);
  const seen = weights.filter((weight) => weight !== null);
  const [height, width] = map.grid;
  const [tall, wide] = [PIXELS / height, PIXELS / width];
  weights.forEach((weight, i) => {
    const [row, column] = [Math.floor(i / width), i % width];
    if (weight === null) {
      context.fillStyle = "rgb(40 44 52 / 0.72)"; // outside the window of the query
    } else {
      const share = (weight - centre()) / range;
      const colour = share < 0 ? NEGATIVE : POSITIVE;
      context.fillStyle = `rgb(${colour.join(" ")} / ${(0.92 * Math.abs(share)).toFixed(3)})`;
    }
    context.fillRect(Math.floor(column * wide), Math.floor(row * tall), Math.ceil(wide), Math.ceil(tall));
  });
  drawQuery(context, map.query, map.query_grid);
  const negative = seen.filter((weight) => weight < 0).length;
  const facts = [
    `Smallest ${number(Math.min(...seen))}, largest ${number(Math.max(...seen))}`,
    `N = ${map.tokens}`,
    `${negative} of ${seen.length} negative`,
  ];
  if (map.kind !== model.kind) facts.unshift(`${titleOf(map.kind)} attention in this layer`);
  if (state.residual) facts.push(map.with_local ? "with the local residual" : "this attention has no local residual");
  panel.facts.textContent = `${facts.join("; ")}.`;
}

function drawGrid(context, [height, width]) {
  context.strokeStyle = "rgb(255 255 255 / 0.28)";
  context.lineWidth = 1;
  context.beginPath();
  for (let row = 1; row < height; row++) {
    context.moveTo(0, (row * PIXELS) / height);
    context.lineTo(PIXELS, (row * PIXELS) / height);
  }
  for (let column = 1; column < width; column++) {
    context.moveTo((column * PIXELS) / width, 0);
    context.lineTo((column * PIXELS) / width, PIXELS);
  }
  context.stroke();
}

function drawQuery(context, [row, column], [height, width]) {
  const box = [(column * PIXELS) / width, (row * PIXELS) / height, PIXELS / width, PIXELS / height];
  for (const [colour, line] of [["#000", 5], ["#ffd400", 3]]) {
    context.strokeStyle = colour;
    context.lineWidth = line;
    context.strokeRect(...box);
  }
}
