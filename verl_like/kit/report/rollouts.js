// The rollout browser and the table of keys. Texts of a run get into the page as text, never as markup.
const PAGE = 150; // rows of the list that are made at once
const fields = new Set(data.fields || []);

const long = (runs) => runs.flatMap(([value, count]) => Array(count).fill(value)); // [[value, count], ...] as a list
const sampledOf = (sample) => (sample.tokens ? long(sample.tokens.sampled) : []);

function meanGap(sample) {
  const { log_probs: own, rollout_log_probs: sampled } = sample.tokens || {};
  if (!own || !sampled) return null;
  const gaps = sampledOf(sample).map((is, i) => (is && own[i] !== null && sampled[i] !== null ? Math.abs(own[i] - sampled[i]) : null)).filter((gap) => gap !== null);
  return gaps.length ? gaps.reduce((sum, gap) => sum + gap, 0) / gaps.length : null;
}

const samples = JSON.parse($("samples").textContent);
samples.forEach((sample, i) => Object.assign(sample, { id: i, gap: meanGap(sample), text: `${sample.input}\n${sample.output}`.toLowerCase() }));
const own = new Set(["id", "gap", "text", "part", ...fields]);

// ---- the list -------------------------------------------------------------------------------------------------------
const columns = [
  ["step", "Step", true], ["score", "Score", true], ["response_tokens", "Tokens", true], ["input", "Prompt", false], ["output", "Response", false],
  ["outcome", "Outcome", false], ["advantage", "Advantage", true], ["gap", "Gap", true], ["group", "Group", true],
];
const state = { sort: "step", down: true, selected: null, mode: "", rows: [], shown: 0 };

const bound = (id) => ($(id).value === "" ? null : Number($(id).value));
const between = (value, low, high) => (low === null || (value !== null && value >= low)) && (high === null || (value !== null && value <= high));

function filtered() {
  const words = $("search").value.toLowerCase(), part = $("part").value, outcome = $("outcome").value;
  const limits = [["step", "step"], ["score", "score"], ["response_tokens", "length"]].map(([name, id]) => [name, bound(`${id}-min`), bound(`${id}-max`)]);
  return samples.filter((sample) => (!words || sample.text.includes(words)) && (!part || sample.part === part) && (!outcome || sample.outcome === outcome)
    && limits.every(([name, low, high]) => between(sample[name], low, high)));
}

function compare(a, b) {
  const [x, y] = [a[state.sort] ?? null, b[state.sort] ?? null];
  if (x === null || y === null) return (x === null) - (y === null) || a.id - b.id; // unknown ones last
  const order = typeof x === "string" ? x.localeCompare(y) : x - y;
  return (state.down ? -order : order) || a.id - b.id;
}

function list() {
  state.rows = filtered().sort(compare);
  state.shown = 0;
  $("list").tBodies[0].replaceChildren();
  for (const head of $("list").tHead.rows[0].cells) {
    if (head.dataset.name === state.sort) head.setAttribute("aria-sort", state.down ? "descending" : "ascending");
    else head.removeAttribute("aria-sort");
  }
  const steps = new Set(state.rows.map((sample) => sample.step)).size;
  $("count").textContent = samples.length ? `${state.rows.length} of ${samples.length} responses, from ${steps} step${steps === 1 ? "" : "s"}` : "This run kept no responses (trainer.sample_freq).";
  more();
}

function more() {
  const next = state.rows.slice(state.shown, state.shown + PAGE);
  $("list").tBodies[0].append(...next.map(listRow));
  state.shown += next.length;
  $("more").hidden = state.shown >= state.rows.length;
}

function listRow(sample) {
  const row = element("tr", { tabIndex: 0 });
  row.dataset.id = sample.id;
  row.setAttribute("aria-selected", String(state.selected === sample));
  for (const [name, label, numeric] of columns) {
    const value = sample[name], text = name === "score" && value === null ? "failed" : numeric ? number(value) : String(value ?? "");
    const kind = name === "input" || name === "output" ? "text" : numeric ? "number" : "";
    const cell = element("td", { className: kind }, kind === "text" ? text.replace(/\s+/g, " ").slice(0, 160) : text);
    cell.dataset.label = label; // said in the cell where a narrow page has no room for the row of heads
    row.append(cell);
  }
  return row;
}

function select(sample, reveal) {
  state.selected = sample;
  for (const row of $("list").tBodies[0].rows) row.setAttribute("aria-selected", String(Number(row.dataset.id) === sample.id));
  detail(sample);
  if (reveal) $("list").querySelector(`tr[data-id="${sample.id}"]`)?.scrollIntoView({ block: "nearest" });
}

// ---- one response ---------------------------------------------------------------------------------------------------
// Colourings: value of each token, size of a value that gets full colour at least, and what the colours mean.
const difference = (a, b) => a && b && a.map((value, i) => (value === null || b[i] === null ? null : value - b[i]));
const modes = {
  gap: ["Log-prob gap", (t) => difference(t.log_probs, t.rollout_log_probs), 0.02, "orange: the trainer finds the token more probable than the rollout engine did, blue: less"],
  entropy: ["Entropy", (t) => t.entropy, 0.5, "orange: the policy was undecided"],
  advantage: ["Advantage", (t) => t.advantages, 0.1, "orange: made more probable by the update, blue: less"],
  surprise: ["Log-prob", (t) => t.rollout_log_probs && t.rollout_log_probs.map((value) => (value === null ? null : -value)), 1, "orange: an improbable token was sampled"],
  reference: ["Against the reference", (t) => difference(t.log_probs || t.rollout_log_probs, t.ref_log_probs), 0.1, "orange: more probable than for the reference, blue: less"],
  weight_version: ["Version", (t) => { const all = long(t.weight_version), oldest = Math.min(...all); return all.map((value) => value - oldest); }, 1, "orange: sampled by newer weights than the oldest token of this response"],
  mask: ["Mask", (t) => long(t.sampled), 1, "orange: sampled by the policy, and trained on; plain: text of tools, template or environment"],
  plain: ["Plain", () => [], 1, ""],
};

function tokenBox(sample, mode) {
  const { text, ...known } = sample.tokens, is = sampledOf(sample);
  const values = modes[mode][1](sample.tokens) || [];
  const sizes = values.filter((value, i) => value !== null && is[i]).map(Math.abs).sort((a, b) => a - b);
  const full = Math.max(modes[mode][2], sizes[Math.floor(0.98 * (sizes.length - 1))] || 0);
  const box = element("div", { className: "box", tabIndex: 0 });
  const turns = sample.tokens.sampled.length > 1;
  let at = 0, turn = 0;
  for (const [sampled, count] of sample.tokens.sampled) {
    const block = turns ? element("div", { className: sampled ? "spoken" : "tool" }) : box;
    if (turns) box.append(element("span", { className: "turn" }, sampled ? `turn ${(turn += 1)}, ${count} tokens` : `not sampled, ${count} tokens`), block);
    for (const end = at + count; at < end; at += 1) block.append(tokenSpan(text[at], at, values[at], full, sampled));
  }
  box.addEventListener("mouseover", ({ target }) => { if (target.dataset.i && !target.title) target.title = tokenFacts(known, Number(target.dataset.i), sample); });
  const scale = modes[mode][3] && element("p", { className: "scale" }, modes[mode][3] + (["mask", "weight_version"].includes(mode) ? "" : `; full colour at ${number(full)}`));
  return element("div", {}, scale || null, box);
}

function tokenSpan(text, i, value, full, sampled) {
  const span = element("span", { className: "t" }, text);
  span.dataset.i = i;
  if (/^<\|?\w+\|?>$/.test(text)) span.classList.add("special");
  if (sampled && value) {
    span.classList.add(value > 0 ? "high" : "low");
    span.style.setProperty("--a", Math.min(1, Math.abs(value) / full));
  }
  return span;
}

function tokenFacts(known, i, sample) {
  const facts = Object.entries(known).filter(([name]) => name !== "sampled" && name !== "weight_version");
  const rows = facts.map(([name, values]) => `${name.replaceAll("_", " ")}: ${number(values[i])}`);
  return [`token ${i + 1}`, ...rows, `weight version: ${long(sample.tokens.weight_version)[i]}`, sampledOf(sample)[i] ? "sampled" : "not sampled"].join("\n");
}

function modeButtons(sample) {
  const there = Object.keys(modes).filter((name) => modes[name][1](sample.tokens) !== undefined && modes[name][1](sample.tokens) !== null);
  const mode = there.includes(state.mode) ? state.mode : there.includes("gap") ? "gap" : there[0];
  const holder = element("div", {}, tokenBox(sample, mode));
  const buttons = there.map((name) => {
    const button = element("button", { type: "button" }, modes[name][0]);
    button.dataset.mode = name;
    button.setAttribute("aria-pressed", String(name === mode));
    button.addEventListener("click", () => {
      state.mode = name;
      for (const other of buttons) other.setAttribute("aria-pressed", String(other === button));
      holder.replaceChildren(tokenBox(sample, name));
    });
    return button;
  });
  return [element("div", { className: "modes", role: "group", ariaLabel: "Colour tokens by" }, ...buttons), holder];
}

const scoreText = (sample) => (sample.score === null ? "failed" : number(sample.score));

function groupOf(sample) {
  const others = samples.filter((other) => other.step === sample.step && other.part === sample.part && other.group === sample.group);
  if (others.length < 2) return [];
  const answers = others.map((other) => {
    const facts = element("p", { className: "facts" }, ...[`score ${scoreText(other)}`, `${other.response_tokens} tokens`, other.outcome].map((text) => element("span", {}, text)));
    const button = element("button", { type: "button", className: `answer${other === sample ? " here" : ""}` }, facts, element("div", { className: "box" }, other.output));
    button.addEventListener("click", () => select(other, true));
    return button;
  });
  return [element("h4", {}, `The same prompt: ${others.length} responses that were kept`), element("div", { className: "side" }, ...answers)];
}

function pairs(sample) {
  const parts = Object.keys(sample).filter((name) => !own.has(name));
  const about = ["data_source", "dataset_index", "validation_set", "prompt_id", "finish_reason", "turns", "prompt_tokens", "sampled_tokens", "weight_version", "chosen"];
  const rows = [...parts.map((name) => [name, sample[name], true]), ...about.map((name) => [name.replaceAll("_", " "), sample[name], false])];
  const text = (value) => (typeof value === "number" ? number(value) : typeof value === "string" ? value : JSON.stringify(value));
  const table = (wanted) => element("dl", { className: "pairs" }, ...rows.filter(([, value, part]) => part === wanted && value !== undefined && value !== null)
    .flatMap(([name, value]) => [element("dt", {}, name), element("dd", {}, text(value))]));
  return [...(parts.length ? [element("h4", {}, "Reward"), table(true)] : []), element("h4", {}, "About this response"), table(false)];
}

function detail(sample) {
  const facts = [`${sample.part}, step ${sample.step}`, `score ${scoreText(sample)}`, `${sample.response_tokens} tokens`, sample.outcome];
  if (sample.advantage !== undefined && sample.advantage !== null) facts.push(`advantage ${number(sample.advantage)}`);
  const truth = sample.gts === null || sample.gts === undefined || sample.gts === "" ? [] : [element("h4", {}, "Truth"), element("div", { className: "box" }, typeof sample.gts === "string" ? sample.gts : JSON.stringify(sample.gts))];
  const response = sample.tokens ? modeButtons(sample) : [element("div", { className: "box" }, sample.output), element("p", { className: "hint" }, "Its tokens are in the folder samples/, not in this file.")];
  $("detail").replaceChildren(
    element("p", { className: "facts" }, ...facts.map((text, i) => element(i === 1 ? "b" : "span", {}, text))),
    ...(sample.failure ? [element("p", { className: "bad" }, `The reward failed: ${sample.failure}`)] : []),
    element("h4", {}, "Prompt"), element("div", { className: "box" }, sample.input),
    element("h4", {}, "Response"), ...response, ...truth, ...pairs(sample), ...groupOf(sample),
  );
  $("detail").scrollTop = 0;
}

// ---- what the page's controls do ------------------------------------------------------------------------------------
function sortBy(name, down) {
  Object.assign(state, { sort: name, down: down ?? (state.sort === name ? !state.down : columns.find(([other]) => other === name)[2]) });
  list();
}

// A health rule's link: the responses of that step, sorted, coloured or filtered so that what it speaks of is seen.
function show(step, { sort, color: mode, outcome }) {
  $("filters").reset();
  $("step-min").value = $("step-max").value = step;
  $("part").value = "training";
  if (outcome && samples.some((sample) => sample.step === step && sample.outcome === outcome)) $("outcome").value = outcome;
  if (mode || sort === "gap") state.mode = mode || "gap";
  sortBy(sort || "step", sort !== "score" && sort !== "group");
  if (state.rows.length) select(state.rows[0], false);
  $("rollouts").scrollIntoView();
}

function fill(id, name) {
  const values = [...new Set(samples.map((sample) => sample[name]))].sort();
  $(id).append(...values.map((value) => element("option", { value }, value)));
}

function rollouts() {
  fill("part", "part");
  fill("outcome", "outcome");
  $("list").tHead.append(element("tr", {}, ...columns.map(([name, label, numeric]) => {
    const head = element("th", { className: numeric ? "number" : "" }, element("button", { type: "button" }, label));
    head.dataset.name = name;
    head.firstChild.addEventListener("click", () => sortBy(name));
    return head;
  })));
  const body = $("list").tBodies[0], sampleAt = (row) => samples[Number(row.dataset.id)];
  body.addEventListener("click", ({ target }) => select(sampleAt(target.closest("tr")), false));
  body.addEventListener("keydown", (event) => {
    const row = event.target.closest("tr"), next = { ArrowDown: row.nextSibling, ArrowUp: row.previousSibling, Enter: row, " ": row }[event.key];
    if (next) { event.preventDefault(); next.focus(); select(sampleAt(next), true); }
  });
  $("more").addEventListener("click", more);
  $("filters").addEventListener("input", list);
  $("filters").addEventListener("reset", () => setTimeout(list));
  document.addEventListener("keydown", (event) => {
    if (event.key === "/" && !/^(INPUT|SELECT|TEXTAREA)$/.test(document.activeElement.tagName)) { event.preventDefault(); $("search").focus(); }
  });
  for (const chip of document.querySelectorAll("[data-show]")) chip.addEventListener("click", () => show(Number(chip.dataset.step), JSON.parse(chip.dataset.show)));
  list();
  if (state.rows.length) select(state.rows[0], false);
}

function keyTable() {
  const table = $("keys"), only = $("only-changed"), search = $("key-search");
  const apply = () => {
    const words = search.value.toLowerCase();
    table.classList.toggle("only", only.checked && !words); // who searches wants to find any key
    for (const row of table.tBodies[0].rows) row.hidden = !row.textContent.toLowerCase().includes(words);
  };
  only.addEventListener("change", apply);
  search.addEventListener("input", apply);
  apply();
}

if ($("rollouts")) rollouts();
if ($("keys")) keyTable();
