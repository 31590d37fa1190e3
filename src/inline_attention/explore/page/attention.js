// The three attention functions on points of the plane, equal to `inline_attention.ops.attention_matrix`
// (tests/explore/test_page.py compares them).

const LEAKY_SLOPE = 0.01;
const EXP_RATE = 0.2;
const LINEAR_EPS = 1e-6;

const relu = (x) => Math.max(x, 0);

/** φ by name: a function of a point. ReLU(A·x + b) needs {A: [[a, b], [c, d]], b: [e, f]}. */
export const KERNELS = {
  relu: { label: "ReLU(x)", make: () => (p) => p.map(relu) },
  identity: { label: "x (identity)", make: () => (p) => p },
  leaky_relu: { label: "LeakyReLU(x), slope 0.01", make: () => (p) => p.map((x) => (x > 0 ? x : LEAKY_SLOPE * x)) },
  exp: { label: "exp(0.2·x)", make: () => (p) => p.map((x) => Math.exp(EXP_RATE * x)) },
  relu_affine: {
    label: "ReLU(A·x + b)",
    make: ({ A, b }) => (p) => A.map((row, i) => relu(dot(row, p) + b[i])),
  },
};

const dot = (p, q) => p.reduce((total, x, i) => total + x * q[i], 0);
const sum = (values) => values.reduce((total, x) => total + x, 0);

const ROWS = {
  softmax(query, keys, scale) {
    const scores = keys.map((key) => scale * dot(query, key));
    const largest = Math.max(...scores);
    const powers = scores.map((score) => Math.exp(score - largest));
    const total = sum(powers);
    return powers.map((power) => power / total);
  },
  linear(query, keys) {
    const scores = keys.map((key) => dot(query, key));
    const total = sum(scores) + LINEAR_EPS;
    return scores.map((score) => score / total);
  },
  inline(query, keys, scale) {
    const scores = keys.map((key) => dot(query, key));
    const count = keys.length;
    const mean = sum(scores) / count;
    return scores.map((score) => (scale / count) * (score - mean) + 1 / count);
  },
};

export const KINDS = Object.keys(ROWS);

/** The weights of every query on every key. Softmax sees the points themselves, the others φ of them. */
export function weights(kind, queries, keys, phi) {
  const mapped = kind === "softmax" ? (p) => p : phi;
  const mappedKeys = keys.map(mapped);
  const scale = keys[0].length ** -0.5;
  return queries.map((query) => ROWS[kind](mapped(query), mappedKeys, scale));
}

/** The largest difference between two rows. */
export const distance = (p, q) => Math.max(...p.map((x, i) => Math.abs(x - q[i])));

/** Numbers of the rows that are equal within a tolerance, in groups of two and more. */
export function equalGroups(rows, tolerance) {
  const groups = [];
  rows.forEach((row, i) => {
    const group = groups.find((members) => distance(rows[members[0]], row) <= tolerance);
    if (group) group.push(i);
    else groups.push([i]);
  });
  return groups.filter((members) => members.length > 1);
}

/** The two rows that are closest, [i, j, difference]. */
export function closestPair(rows) {
  let best = [0, 1, Infinity];
  for (let i = 0; i < rows.length; i++) {
    for (let j = i + 1; j < rows.length; j++) {
      const difference = distance(rows[i], rows[j]);
      if (!(difference >= best[2])) best = [i, j, difference];
    }
  }
  return best;
}
