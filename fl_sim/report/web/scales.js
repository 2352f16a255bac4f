// Conversion of numbers to positions on an axis and to text.

// Return a function that maps [low, high] to [from, to], linear or logarithmic.
function scale(low, high, from, to, isLog = false) {
  const turn = isLog ? Math.log10 : (value) => value;
  const start = turn(low), width = turn(high) - start || 1;
  return (value) => from + ((turn(value) - start) / width) * (to - from);
}

// Return about `count` round numbers in [low, high].
function ticks(low, high, count, isLog = false) {
  if (isLog) return logTicks(low, high, count);
  const rough = (high - low) / count || 1, power = 10 ** Math.floor(Math.log10(rough));
  const step = power * [1, 2, 5, 10].find((one) => one * power >= rough);
  const found = [];
  for (let at = Math.ceil(low / step - 1e-9); at * step <= high * (1 + 1e-9) && found.length < 50; at += 1) {
    found.push(at * step);
  }
  return found;
}

function logTicks(low, high, count) {
  const found = [];
  const from = Math.floor(Math.log10(low)), to = Math.ceil(Math.log10(high));
  const every = Math.max(1, Math.ceil((to - from) / count));
  for (let power = from; power <= to; power += every) {
    for (const one of to - from <= 2 ? [1, 2, 5] : [1]) found.push(one * 10 ** power);
  }
  return found.filter((value) => value >= low * (1 - 1e-9) && value <= high * (1 + 1e-9));
}

// Return a number as text with `digits` significant digits, with an exponent only if it is very large or small.
function number(value, digits = 4) {
  if (value === null || value === undefined) return "–";
  const size = Math.abs(value);
  if (size !== 0 && (size >= 1e7 || size < 1e-4)) return value.toExponential(2);
  return String(size >= 10 ** digits ? Math.round(value) : Number(value.toPrecision(digits)));
}

function percentText(value) { return value === null ? "–" : value.toFixed(1); }

// Return mean ± standard deviation as text, as in tables.
function spreadText([mean, deviation], told = percentText) {
  if (mean === null) return "–";
  return deviation === null ? told(mean) : `${told(mean)} ± ${told(deviation)}`;
}
