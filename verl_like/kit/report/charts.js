"use strict";
// Hands the tables of charts.py to Bokeh, which draws them.
const $ = (id) => document.getElementById(id);
const data = JSON.parse($("data").textContent);

function element(tag, properties, ...children) {
  const made = Object.assign(document.createElement(tag), properties);
  made.append(...children.filter((child) => child !== null && child !== undefined));
  return made;
}

const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
const number = (value) => {
  if (value === null || value === undefined) return "–";
  return value !== 0 && Math.abs(value) < 1e-4 ? value.toExponential(2) : String(Number(value.toPrecision(4)));
};
const median = (values) => {
  const sorted = values.filter((value) => value !== null).sort((a, b) => a - b);
  return sorted.length ? (sorted[(sorted.length - 1) >> 1] + sorted[sorted.length >> 1]) / 2 : null;
};

// ---- drawn at once, for a page may be printed or pictured as a whole; again when the theme changes ----------------------
const plots = new Map(); // element -> { drawing: makes its figure, view: what Bokeh made of that }

function plot(target, drawing) {
  plots.set(target, { drawing, view: null });
  draw(target);
}

function draw(target) {
  const known = plots.get(target);
  target.replaceChildren();
  Bokeh.Plotting.show(known.drawing(), target).then((view) => { known.view = view; })
    .catch((error) => { target.textContent = `This chart failed: ${error.message}`; });
}

$("theme").addEventListener("click", () => {
  const theme = document.documentElement.dataset.theme === "dark" ? "light" : "dark";
  document.documentElement.dataset.theme = theme;
  try { localStorage.setItem("verl_like.theme", theme); } catch { /* a browser may forbid it to files */ }
  for (const target of plots.keys()) draw(target);
});

// Paper has a width and a theme of its own. A browser that prints waits for no promise, so what is drawn is copied.
addEventListener("beforeprint", () => { for (const [target, { view }] of plots) if (view) target.append(pictureOf(view)); });
addEventListener("afterprint", () => { for (const picture of document.querySelectorAll(".picture")) picture.remove(); });

// A chart as SVG that takes any width, and the page's colours whatever they become.
function pictureOf(view) {
  const picture = view.export("svg").canvas;
  picture.setAttribute("viewBox", `0 0 ${view.bbox.width} ${view.bbox.height}`);
  picture.classList.add("picture");
  const names = new Map(["muted", "line", "surface", ...Array.from({ length: 12 }, (_, i) => `c${i}`)].flatMap((name) => {
    const parts = color(name).match(/\w\w/g).map((part) => parseInt(part, 16));
    return [[color(name), name], [`rgb(${parts})`, name]]; // Bokeh writes both
  }));
  for (const node of picture.querySelectorAll("*")) {
    for (const part of ["fill", "stroke"]) {
      const name = names.get(node.getAttribute(part));
      if (name) node.style[part] = `var(--${name})`;
    }
  }
  return picture;
}

// ---- one range of steps for all charts ------------------------------------------------------------------------------
const allSteps = data.runs.flatMap((run) => run.steps);
const last = allSteps.reduce((highest, step) => Math.max(highest, step), 1);
const whole = [-0.01 * last, 1.02 * last];
let shownSteps = [...whole];
let ranges = [];

function stepRange() {
  const range = new Bokeh.Range1d({ start: shownSteps[0], end: shownSteps[1] });
  ranges = [...ranges.filter((other) => other.document !== null), range];
  range.change.connect(() => {
    if (range.start !== shownSteps[0] || range.end !== shownSteps[1]) showSteps(range.start, range.end);
  });
  return range;
}

function showSteps(start, end) {
  shownSteps = [start, end];
  for (const range of ranges) range.setv({ start, end });
}

function figureOf(options, hover) {
  const tools = [new Bokeh.BoxZoomTool({ dimensions: "width" }), ...(hover ? [hover] : [])];
  return new Bokeh.Plotting.Figure({ sizing_mode: "stretch_both", toolbar_location: null, tools, min_border: 4, ...options });
}

// ---- curves ---------------------------------------------------------------------------------------------------------
function finite(run, metric) {
  const values = run.metrics[metric] || [];
  const kept = run.steps.map((step, i) => [step, values[i]]).filter(([, value]) => value !== null && value !== undefined);
  return { x: kept.map(([step]) => step), y: kept.map(([, value]) => value) };
}

function smooth(values) {
  const reach = Math.floor(values.length / 60);
  return values.map((_, i) => {
    const near = values.slice(Math.max(0, i - reach), i + reach + 1);
    return near.reduce((sum, value) => sum + value, 0) / near.length;
  });
}

// What sets the i-th series apart: one of the twelve colours of report.css, and a dash (of bars: a hatch) that each third
// one has. Colours with the same dash differ for colour-blind readers too.
const styleOf = (i) => ({ color: `c${i % 12}`, turn: (i + Math.floor(i / 12)) % 3 });
const DASHES = ["solid", "dashed", "dotted"], HATCHES = ["blank", "right_diagonal_line", "dot"];

// Lines of a chart: of one run all its metrics; of several runs the first metric of each run, in the run's style.
function linesOf(chart) {
  const points = chart.points.map((line) => ({ ...line, dots: true }));
  if (data.runs.length === 1) return [...chart.lines, ...points].map((line, i) => ({ ...line, run: data.runs[0], ...styleOf(i) }));
  const wanted = [...chart.lines.slice(0, 1), ...points.slice(0, 1)];
  return data.runs.flatMap((run, i) => wanted.map((line) => ({ ...line, run, label: `${run.name}: ${line.label}`, ...styleOf(i) })));
}

function drawCurves(lines) {
  const steps = [...new Set(lines.flatMap((line) => line.run.steps))].sort((a, b) => a - b);
  const table = { step: steps, height: [] };
  lines.forEach((line, i) => {
    const at = new Map(line.run.steps.map((step, k) => [step, (line.run.metrics[line.metric] || [])[k]]));
    table[`v${i}`] = steps.map((step) => number(at.get(step)));
    steps.forEach((step, k) => { table.height[k] ??= at.get(step); });
  });
  const hover = new Bokeh.HoverTool({ mode: "vline", tooltips: [["step", "@step"], ...lines.map((line, i) => [line.label, `@v${i}`])] });
  const level = lines.flatMap((line) => finite(line.run, line.metric).y);
  const flat = level.every((value) => value === level[0]) && level[0]; // else a constant of 1e-6 would be drawn as 0
  const limits = new Bokeh.DataRange1d({ range_padding: 0.08, default_span: Math.abs(flat) || 1 });
  const figure = figureOf({ x_range: stepRange(), y_range: limits }, hover);
  for (const line of lines) {
    const source = finite(line.run, line.metric), paint = color(line.color), many = !line.dots && source.x.length >= 60;
    if (many) figure.line(source.x, source.y, { line_color: paint, line_width: 1, line_alpha: 0.28 });
    figure.line(source.x, many ? smooth(source.y) : source.y, { line_color: paint, line_width: line.dots ? 1.5 : 1.9, line_dash: DASHES[line.turn] });
    if (line.dots || source.x.length < 3) figure.scatter(source.x, source.y, { size: 6, fill_color: paint, line_color: null });
  }
  limits.renderers = [...figure.renderers]; // without the line that only carries the hover
  const source = new Bokeh.ColumnDataSource({ data: { ...table, height: table.height.map((value) => value ?? NaN) } });
  hover.renderers = [figure.line({ field: "step" }, { field: "height" }, { source, line_alpha: 0 })];
  return figure;
}

function curve(chart) {
  const lines = linesOf(chart).filter((line) => finite(line.run, line.metric).x.length);
  if (!lines.length) return null;
  const frame = element("div", { className: "plot" });
  const legend = element("div", { className: "legend" }, ...lines.map((line) => {
    const sign = element("i", { className: line.dots ? "line dots" : "line" });
    sign.style.borderTopStyle = DASHES[line.turn];
    sign.style.color = `var(--${line.color})`;
    return element("span", { title: line.metric }, sign, `${line.label}, last ${number(finite(line.run, line.metric).y.at(-1))}`);
  }));
  frame.addEventListener("dblclick", () => showSteps(...whole));
  const caption = element("figcaption", { title: `${chart.title}. ${chart.note}` }, chart.title, chart.note ? element("span", { className: "note" }, chart.note) : null);
  return { figure: element("figure", {}, caption, frame, legend), draw: () => plot(frame, () => drawCurves(lines)) };
}

function drawCharts() {
  for (const section of new Set(data.charts.map((chart) => chart.section))) {
    const charts = data.charts.filter((chart) => chart.section === section).map(curve).filter(Boolean);
    $("charts").append(element("h3", { className: "part" }, section), element("div", { className: "charts" }, ...charts.map(({ figure }) => figure)));
    for (const chart of charts) chart.draw(); // into the page, where they have a size
  }
  const names = [...new Set(data.runs.flatMap((run) => Object.keys(run.metrics)))].sort();
  $("metrics").append(...names.map((name) => element("option", { value: name })));
  $("metric").addEventListener("change", () => {
    const name = $("metric").value.trim();
    if (!names.includes(name)) return;
    const picked = curve({ title: name, note: "", lines: [{ metric: name, label: name }], points: [] });
    if (picked) { $("picked").prepend(picked.figure); picked.draw(); }
    $("metric").value = "";
  });
}

// ---- where the time goes --------------------------------------------------------------------------------------------
const phaseStyle = (phases, name) => styleOf(phases.names.indexOf(name));
const phaseColor = (phases, name) => color(phaseStyle(phases, name).color);

function phaseSign(phases, name) {
  const { color: paint, turn } = phaseStyle(phases, name), sign = element("i", { className: `sign ${HATCHES[turn]}` });
  sign.style.backgroundColor = `var(--${paint})`;
  return sign;
}

function phaseTable(phases) {
  const sum = (values) => values.reduce((all, value) => all + (value || 0), 0);
  const rows = phases.names.map((name) => {
    const ran = phases.seconds[name].filter(Boolean); // saving and validation are not of every step
    return [name, ran.length, median(ran) || 0, sum(ran) / (sum(phases.total) || 1), phases.floors[name] ? median(phases.floors[name]) : null];
  });
  const cells = (values) => values.map((value) => element("td", { className: "number" }, value));
  $("phase-table").tBodies[0].append(...rows.map(([name, count, seconds, share, floor]) => {
    const ratio = floor && seconds ? `${number(seconds / floor)}×` : "–";
    return element("tr", {}, element("td", {}, phaseSign(phases, name), name), ...cells([String(count), `${number(seconds)} s`, `${(100 * share).toFixed(0)}%`, floor ? `${number(floor)} s` : "–", ratio]));
  }));
}

function drawPhaseSteps(phases) {
  const size = Math.max(1, Math.ceil(phases.steps.length / 120)); // bars of a long run stand for several steps each
  const starts = phases.steps.map((_, i) => i).filter((i) => i % size === 0);
  const mean = (values, i) => { const part = values.slice(i, i + size); return part.reduce((sum, value) => sum + (value || 0), 0) / part.length; };
  const x = starts.map((i) => (phases.steps[i] + phases.steps[Math.min(i + size, phases.steps.length) - 1]) / 2);
  const hover = new Bokeh.HoverTool({ tooltips: [["step", "@step"], ["phase", "@phase"], ["seconds", "@seconds{0.000}"]] });
  const figure = figureOf({ x_range: stepRange(), y_range: new Bokeh.DataRange1d({ start: 0, range_padding: 0.05 }) }, hover);
  let bottom = x.map(() => 0);
  for (const name of phases.names) {
    const seconds = starts.map((i) => mean(phases.seconds[name], i));
    const top = seconds.map((value, i) => bottom[i] + value);
    const source = new Bokeh.ColumnDataSource({ data: { x, bottom, top, seconds, step: x.map(String), phase: x.map(() => name) } });
    figure.vbar({ field: "x" }, { value: size * 0.9 }, { field: "top" }, { field: "bottom" }, { source, fill_color: phaseColor(phases, name), line_color: null, hatch_pattern: HATCHES[phaseStyle(phases, name).turn], hatch_color: color("surface"), hatch_alpha: 0.6, hatch_scale: 6 });
    bottom = top;
  }
  return figure;
}

// The row of one step, or of the median of all steps (which = 0): where each phase begins, ends, and its floor.
function waterfallRows(phases, which) {
  const at = (values) => (values ? (which ? values[which - 1] : median(values)) : null);
  const rows = { phase: [], left: [], right: [], floor: [], seconds: [], least: [], color: [] };
  let left = 0;
  for (const name of phases.names) {
    const seconds = at(phases.seconds[name]) || 0, floor = at(phases.floors[name]);
    if (!seconds) continue;
    const row = { phase: name, left, right: left + seconds, floor: left + Math.min(floor || 0, seconds), seconds: number(seconds), least: number(floor), color: phaseColor(phases, name) };
    for (const key of Object.keys(rows)) rows[key].push(row[key]);
    left += seconds;
  }
  return { rows, left };
}

function drawWaterfall(phases, which) {
  const { rows, left } = waterfallRows(phases, which);
  const source = new Bokeh.ColumnDataSource({ data: rows });
  const hover = new Bokeh.HoverTool({ tooltips: [["phase", "@phase"], ["seconds", "@seconds"], ["floor", "@least"]] });
  const names = new Bokeh.FactorRange({ factors: [...rows.phase].reverse() });
  const figure = figureOf({ x_range: new Bokeh.Range1d({ start: 0, end: 1.02 * left || 1 }), y_range: names }, hover);
  hover.renderers = [figure.hbar({ field: "phase" }, { value: 0.7 }, { field: "right" }, { field: "left" }, { source, fill_color: { field: "color" }, line_color: null, fill_alpha: 0.35 })];
  figure.hbar({ field: "phase" }, { value: 0.7 }, { field: "floor" }, { field: "left" }, { source, fill_color: { field: "color" }, line_color: null });
  return figure;
}

function drawPhases(phases) {
  plot($("phase-steps"), () => drawPhaseSteps(phases));
  $("phase-steps").addEventListener("dblclick", () => showSteps(...whole));
  $("phase-legend").append(...phases.names.map((name) => element("span", {}, phaseSign(phases, name), name)));
  const slider = $("waterfall-step");
  slider.max = phases.steps.length;
  plot($("waterfall"), () => drawWaterfall(phases, Number(slider.value)));
  slider.addEventListener("input", () => {
    const which = Number(slider.value);
    $("waterfall-title").textContent = which ? `Step ${phases.steps[which - 1]}` : "A typical step";
    draw($("waterfall"));
  });
}

if (window.Bokeh) Bokeh.set_log_level("warn");
if (window.Bokeh && $("charts")) drawCharts();
if (window.Bokeh && $("phase-steps")) drawPhases(data.phases);
if ($("phase-table")) phaseTable(data.phases);
