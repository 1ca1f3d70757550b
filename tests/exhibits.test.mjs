// Units of the live exhibits: random numbers, small matrices and steps of Q. Run by tests/test_modules.py.
import assert from "node:assert/strict";
import { test } from "node:test";
import * as algebra from "./algebra.js";
import * as kit from "./kit.js";

const {
  PATTERNS,
  apply,
  eigenvalues,
  falling,
  fit,
  gram,
  identity,
  inverse,
  kron,
  learn,
  pair,
  precondition,
  product,
  spectrum,
  spread,
  step,
  times,
  transpose,
  turned,
} = algebra;
const draw = (seed, count) => Array.from({ length: count }, kit.normals(seed));
const matrix = (seed, n) => {
  const normal = kit.normals(seed);
  return Array.from({ length: n }, () => Array.from({ length: n }, normal));
};
const upper = (seed, n) => matrix(seed, n).map((row, i) => row.map((x, j) => (j > i ? x : j === i ? 1 + Math.abs(x) : 0)));
const near = (mine, theirs, tolerance = 1e-12) =>
  assert.ok(kit.difference(mine, theirs) < tolerance, `${JSON.stringify(mine)} is not ${JSON.stringify(theirs)}`);

/** mulberry32 and Box-Muller over integers of any size, one operation a line. */
function slowNormals(seed, count) {
  const mask = 0xffffffffn;
  let state = BigInt(seed);
  const uniform = () => {
    state = (state + 0x6d2b79f5n) & mask;
    let t = ((state ^ (state >> 15n)) * (state | 1n)) & mask;
    t = ((t + (((t ^ (t >> 7n)) * (t | 61n)) & mask)) ^ t) & mask;
    return Number(t ^ (t >> 14n)) / 2 ** 32;
  };
  return Array.from({ length: count }, () => {
    const radius = Math.sqrt(-2 * Math.log(1 - uniform()));
    return radius * Math.cos(2 * Math.PI * uniform());
  });
}

test("random numbers are those of the generator, for small and large seeds", () => {
  for (const seed of [0, 1, 7, 2 ** 31, 2 ** 32 - 1]) near(draw(seed, 300), slowNormals(seed, 300));
});

test("random numbers repeat for a seed, differ between seeds, and are normal", () => {
  assert.deepEqual(draw(3, 50), draw(3, 50));
  assert.notDeepEqual(draw(3, 50), draw(4, 50));
  const z = draw(11, 20000),
    mean = f => z.reduce((sum, x) => sum + f(x), 0) / z.length;
  assert.ok(Math.abs(mean(x => x)) < 0.03 && Math.abs(mean(x => x * x) - 1) < 0.04 && Math.abs(mean(x => x ** 4) - 3) < 0.2);
  assert.ok(Math.max(...z.map(Math.abs)) < Math.sqrt(64 * Math.LN2));
});

test("a difference is relative above 1, nested, and never small where shapes or numbers are wrong", () => {
  assert.equal(kit.difference([1, [2, 200]], [1, [2, 100]]), 1);
  assert.equal(kit.difference([0.5], [0.25]), 0.25);
  assert.equal(kit.difference([1, 2], [1, 2, 3]), Number.POSITIVE_INFINITY);
  for (const wrong of [Number.NaN, Number.POSITIVE_INFINITY]) assert.ok(!(kit.difference([wrong, 1], [0, 1]) < 1e-9));
});

test("pixels and places are mapped onto each other", () => {
  const [to, from] = kit.scales([-2, 6, 1, 5], 300, 200);
  assert.deepEqual(to([-2, 5]), [0, 0]);
  assert.deepEqual(to([6, 1]), [300, 200]);
  near(from(...to([0.3, 4.1])), [0.3, 4.1]);
});

test("powers of ten are written with raised digits", () => {
  assert.equal(kit.power(-12), "10⁻¹²");
});

test("an inverse undoes its matrix, and a Kronecker product multiplies factor by factor", () => {
  const A = upper(1, 3),
    B = upper(2, 4);
  near(product(A, inverse(A)), identity(3));
  near(inverse(kron(A, B)), kron(inverse(A), inverse(B)), 1e-10);
  const C = matrix(3, 3),
    D = matrix(4, 4);
  near(product(kron(A, B), kron(C, D)), kron(product(A, C), product(B, D)), 1e-11);
});

test("eigenvalues come back from a turned diagonal, and keep trace and squares of any matrix", () => {
  near(pair(turned(0.7, -0.3, 2)), [-0.3, 2]);
  const [xx, xy, yy] = turned(1.1, 5, 0.01);
  near(
    eigenvalues([
      [xx, xy],
      [xy, yy],
    ]),
    [0.01, 5],
  );
  const A = matrix(5, 7),
    S = A.map((row, i) => row.map((x, j) => x + A[j][i])),
    values = eigenvalues(S);
  const sum = list => list.reduce((a, b) => a + b, 0);
  near(sum(values), sum(S.map((row, i) => row[i])), 1e-11);
  near(sum(values.map(x => x * x)), sum(S.flat().map(x => x * x)), 1e-11);
  assert.deepEqual(
    values,
    [...values].sort((a, b) => a - b),
  );
  assert.equal(spread([-4, 2, 1]), 4);
});

test("the eigenvalues of P H have the signs of those of H", () => {
  const A = matrix(6, 4),
    H = A.map((row, i) => row.map((x, j) => x + A[j][i]));
  assert.deepEqual(spectrum(upper(7, 4), H).map(Math.sign), eigenvalues(H).map(Math.sign));
});

test("three numbers learn as the triangular matrix does that they stand for", () => {
  let q = [1, 0, 1],
    Q = identity(2);
  const H = turned(0.4, 3, -0.2),
    normal = kit.normals(9),
    square = x => x.map(a => x.map(b => a * b));
  for (let t = 0; t < 40; t++) {
    const v = [normal(), normal()],
      h = times(H, v);
    Q = step(Q, PATTERNS.triangle, square(apply(Q, h)), square(apply(transpose(inverse(Q)), v)), 0.2);
    q = learn(q, v, h, 0.2);
    near(
      [
        [q[0], q[1]],
        [0, q[2]],
      ],
      Q,
      1e-9,
    );
  }
  near(precondition(q, [0.3, -2]), apply(product(transpose(Q), Q), [0.3, -2]), 1e-9);
});

test("a step keeps its pattern, and its largest relative change is the rate", () => {
  for (const [name, pattern] of Object.entries(PATTERNS)) {
    const n = 4,
      Q = upper(3, n).map((row, i) => row.map((x, j) => (pattern(i, j, n) ? x : 0)));
    const A = matrix(4, n),
      B = matrix(8, n),
      moved = step(Q, pattern, product(A, transpose(A)), product(B, transpose(B)), 0.3);
    assert.ok(
      moved.every((row, i) => row.every((x, j) => pattern(i, j, n) || x === 0)),
      name,
    );
    const change = product(moved, inverse(Q)).flatMap((row, i) => row.map((x, j) => Math.abs(x - (i === j ? 1 : 0))));
    near(Math.max(...change), 0.3);
    assert.equal(step(Q, pattern, A, A, 0.3), Q);
  }
});

test("the unfolding of a product keeps what belongs to one factor", () => {
  const A = matrix(1, 2),
    B = matrix(2, 3),
    length = M => M.flat().reduce((sum, x) => sum + x * x, 0);
  const scaled = (M, c) => product(M, transpose(M)).map(row => row.map(x => c * x));
  near(gram(kron(A, B), [2, 3], 0), scaled(A, length(B)), 1e-11);
  near(gram(kron(A, B), [2, 3], 1), scaled(B, length(A)), 1e-11);
});

test("a form fits what it can represent, and no more", () => {
  const rates = falling(150),
    { triangle: T, diagonal: D } = PATTERNS;
  const H = kron(
    [
      [2, 0.5],
      [0.5, -1],
    ],
    [
      [3, 1, 0],
      [1, 1, 0.5],
      [0, 0.5, 2],
    ],
  );
  assert.ok(spread(spectrum(fit(H, [2, 3], [T, T], rates), H)) < 1.2);
  assert.ok(spread(spectrum(fit(H, [6], [D], rates), H)) > 2);
});
