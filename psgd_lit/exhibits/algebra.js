// Small matrices, as lists of rows, and how the library's groups learn from pairs of a probe and its product.

export function dot(a, b) {
  let sum = 0;
  for (let i = 0; i < a.length; i++) sum += a[i] * b[i];
  return sum;
}

/** The multiple of the identity at which Q starts: P lies between what balances the pair and what fits it. */
export function firstScale(v, h) {
  const [a, b] = [v, h].map(x => Math.sqrt(dot(x, x))),
    cosine = Math.max(Math.abs(dot(v, h)) / (a * b), 1 / Math.sqrt(v.length));
  return Math.sqrt((a / b) * Math.sqrt(cosine));
}

export const apply = (M, x) => M.map(row => dot(row, x));
export const product = (A, B) =>
  A.map(row => {
    const sums = Array(B[0].length).fill(0);
    for (let k = 0; k < row.length; k++) if (row[k] !== 0) for (let j = 0; j < sums.length; j++) sums[j] += row[k] * B[k][j];
    return sums;
  });
export const transpose = A => A[0].map((_, j) => A.map(row => row[j]));
export const diagonal = d => d.map((x, i) => d.map((_, j) => (i === j ? x : 0)));
export const identity = n => diagonal(Array(n).fill(1));

/** A (x) B. */
export const kron = (A, B) => A.flatMap(a => B.map(b => a.flatMap(x => b.map(y => x * y))));

/** The symmetric matrix [xx, xy, yy] with these eigenvalues, the first along the angle. */
export function turned(angle, first, second) {
  const c = Math.cos(angle),
    s = Math.sin(angle);
  return [c * c * first + s * s * second, c * s * (first - second), s * s * first + c * c * second];
}

/** [xx, xy, yy] times a vector. */
export const times = ([xx, xy, yy], [x, y]) => [xx * x + xy * y, xy * x + yy * y];

/** The two eigenvalues of [xx, xy, yy], ascending. */
export function pair([xx, xy, yy]) {
  const r = Math.hypot((xx - yy) / 2, xy);
  return [(xx + yy) / 2 - r, (xx + yy) / 2 + r];
}

/** The eigenvalues of a symmetric matrix, ascending, by Jacobi's rotations. */
export function eigenvalues(M) {
  const A = M.map(row => [...row]),
    n = A.length;
  for (let sweep = 0; sweep < 30; sweep++) {
    let off = 0;
    for (let p = 0; p < n; p++)
      for (let q = p + 1; q < n; q++) {
        off = Math.max(off, Math.abs(A[p][q]) / (Math.sqrt(Math.abs(A[p][p] * A[q][q])) || 1));
        if (A[p][q] === 0) continue;
        const theta = (A[q][q] - A[p][p]) / (2 * A[p][q]),
          t = (Math.sign(theta) || 1) / (Math.abs(theta) + Math.hypot(theta, 1));
        const c = 1 / Math.hypot(t, 1),
          s = t * c;
        const turn = (x, y) => [c * x - s * y, s * x + c * y];
        for (const row of A) [row[p], row[q]] = turn(row[p], row[q]);
        for (let k = 0; k < n; k++) [A[p][k], A[q][k]] = turn(A[p][k], A[q][k]);
      }
    if (off < 1e-13) break; // the next sweep would change less than rounding does
  }
  return A.map((row, i) => row[i]).sort((a, b) => a - b);
}

/** The eigenvalues of P H, which are those of Q H Q^T. */
export const spectrum = (Q, H) => eigenvalues(product(product(Q, H), transpose(Q)));

/** The largest size of an eigenvalue over the smallest. */
export function spread(values) {
  const sizes = values.map(Math.abs);
  return Math.max(...sizes) / Math.min(...sizes);
}

/** The inverse of an upper triangular matrix. */
export function inverse(Q) {
  const n = Q.length,
    X = identity(n);
  for (let j = 0; j < n; j++)
    for (let i = j; i >= 0; i--) {
      let sum = X[i][j];
      for (let k = i + 1; k <= j; k++) sum -= Q[i][k] * X[k][j];
      X[i][j] = sum / Q[i][i];
    }
  return X;
}

/** Which entries of a factor may differ from zero. */
export const PATTERNS = {
  triangle: (i, j) => j >= i,
  diagonal: (i, j) => i === j,
  column: (i, j, n) => i === j || (j === n - 1 && i < j), // a scale and a shift for each input
};

/** Q after a step of relative gradient descent: (I - rate E / max|E|) Q, with the entries of A - B that the pattern has as E. */
export function step(Q, pattern, A, B, rate) {
  const n = Q.length,
    E = A.map((row, i) => row.map((x, j) => (pattern(i, j, n) ? x - B[i][j] : 0)));
  const largest = Math.max(...E.flat().map(Math.abs));
  if (largest === 0) return Q;
  const move = product(E, Q);
  return Q.map((row, i) => row.map((x, j) => x - (rate / largest) * move[i][j]));
}

/** X X^T of the unfolding of X, whose rows are a block of these sizes, along one of its dimensions. */
export function gram(X, sizes, along) {
  const n = sizes[along],
    after = sizes.slice(along + 1).reduce((a, b) => a * b, 1),
    period = n * after;
  const G = Array.from({ length: n }, () => Array(n).fill(0));
  for (let base = 0; base < X.length; base += period)
    for (let rest = 0; rest < after; rest++)
      for (let i = 0; i < n; i++) for (let j = 0; j < n; j++) G[i][j] += dot(X[base + i * after + rest], X[base + j * after + rest]);
  return G;
}

/** Rates of so many steps, falling from 0.5 to 0.005. */
export const falling = count => Array.from({ length: count }, (_, t) => 0.5 * 0.01 ** (t / count));

/** Learn Q = Q_1 (x) Q_2 (x) ... of these sizes and patterns, with all unit vectors as probes, at each of the rates. */
export function fit(H, sizes, patterns, rates) {
  let factors = sizes.map(identity);
  for (const rate of rates) {
    const a = product(factors.reduce(kron), H),
      b = transpose(factors.map(inverse).reduce(kron));
    factors = factors.map((Q, f) => step(Q, patterns[f], gram(a, sizes, f), gram(b, sizes, f), rate));
  }
  return factors.reduce(kron);
}

/** P g for Q = [[q0, q1], [0, q2]] and P = Q^T Q. */
export const precondition = ([q0, q1, q2], [x, y]) => [q0 * (q0 * x + q1 * y), q1 * (q0 * x + q1 * y) + q2 * q2 * y];

/** Such a Q after one step on the pair of a probe v and its product h. */
export function learn([q0, q1, q2], v, h, rate) {
  const a = [q0 * h[0] + q1 * h[1], q2 * h[1]],
    b0 = v[0] / q0,
    b = [b0, (v[1] - q1 * b0) / q2];
  const E = [a[0] ** 2 - b[0] ** 2, a[0] * a[1] - b[0] * b[1], a[1] ** 2 - b[1] ** 2];
  const r = rate / (Math.max(...E.map(Math.abs)) || 1);
  return [q0 - r * E[0] * q0, q1 - r * (E[0] * q1 + E[1] * q2), q2 - r * E[2] * q2];
}
