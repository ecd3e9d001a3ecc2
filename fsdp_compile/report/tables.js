// The tables: all plans, one or two of them beside each other, the memory at the peak, and the buckets.

const sum = (numbers) => numbers.reduce((total, each) => total + each, 0);

const movedBy = (gathers) => (plan) =>
  sum(plan.collectives.filter((each) => (each.kind === "all_gather") === gathers).map((each) => each.bytes));

const countOf = (gathers) => (plan) =>
  plan.collectives.filter((each) => (each.kind === "all_gather") === gathers).length;

// Figures of a plan. `part` is shown as belonging to the figure above it; less is better where `judged`; all plans are
// told apart by those of the `overview`.
const FIGURES = [
  { name: "step", of: (plan) => plan.step, format: duration, judged: true, overview: true },
  { name: "no plan below", of: (plan) => plan.leastStep, format: duration, part: true, overview: true },
  { name: "compute", of: (plan) => plan.computing, format: duration, overview: true },
  { name: "communication", of: (plan) => plan.communicating, format: duration },
  { name: "exposed", of: (plan) => plan.exposed, format: duration, part: true, judged: true, overview: true },
  { name: "no plan below", of: (plan) => plan.leastExposed, format: duration, part: true, overview: true },
  { name: "peak memory", of: (plan) => plan.peak, format: size, judged: true, overview: true },
  { name: "no plan below", of: (plan) => plan.leastPeak, format: size, part: true, overview: true },
  { name: "gathers", of: countOf(true), format: count },
  { name: "gathered", of: movedBy(true), format: size, part: true },
  { name: "reductions", of: countOf(false), format: count },
  { name: "reduced", of: movedBy(false), format: size, part: true },
];

const heading = (text, numeric = true) =>
  element("th", { scope: "col", ...(numeric && { class: "number" }) }, text);

const numberCell = (text, kind = "") => element("td", { class: `number ${kind}`.trim() }, text);

const fits = (plan, memory) =>
  plan.peak <= memory ? `yes, ${size(memory - plan.peak)} left` : `no, ${size(plan.peak - memory)} too much`;

function overviewTable(plans, memory) {
  const columns = FIGURES.filter((figure) => figure.overview);
  const head = ["plan", ...columns.map((each) => each.name), ...(memory ? ["fits"] : [])];
  return [
    element("thead", {}, element("tr", {}, ...head.map((name, index) => heading(name, index > 0)))),
    element("tbody", {}, ...plans.map((plan) => element("tr", {},
      element("th", { scope: "row" }, plan.name),
      ...columns.map((each) => numberCell(each.format(each.of(plan)))),
      ...(memory ? [numberCell(fits(plan, memory), plan.peak <= memory ? "better" : "worse")] : []),
    ))),
  ];
}

// One plan, or two and what the second has more than the first.
function comparisonTable(rows, plans, corner, more = []) {
  const head = [corner, ...plans.map((plan) => plan.name), ...(plans.length > 1 ? ["difference"] : [])];
  return [
    element("thead", {}, element("tr", {}, ...head.map((name, index) => heading(name, index > 0)))),
    element("tbody", {}, ...rows.map((row) => element("tr", {},
      element("th", { scope: "row", ...(row.part && { class: "part" }) }, row.name),
      ...plans.map((plan) => numberCell(row.format(row.of(plan)))),
      ...(plans.length > 1 ? [differenceCell(row, ...plans.map(row.of))] : []),
    )), ...more),
  ];
}

function differenceCell(row, before, after) {
  const kind = !row.judged || before === after ? "" : after < before ? "better" : "worse";
  return numberCell(difference(row.format, before, after), kind);
}

function summaryTable(plans, memory) {
  const fitting = memory && element("tr", {},
    element("th", { scope: "row" }, `fits into ${size(memory)}`),
    ...plans.map((plan) => numberCell(fits(plan, memory), plan.peak <= memory ? "better" : "worse")),
    ...(plans.length > 1 ? [numberCell("")] : []));
  return comparisonTable(FIGURES, plans, "of a step, on each rank", fitting ? [fitting] : []);
}

function peakTable(plans) {
  const categories = Object.keys(plans[0].composition).filter((name) => plans.some((plan) => plan.composition[name]));
  const rows = categories.map((name) => ({ name, of: (plan) => plan.composition[name], format: size, judged: true }));
  const whole = { name: "in all", of: (plan) => plan.peak, format: size, judged: true };
  return comparisonTable([...rows, whole], plans, "bytes of");
}

function bucketTable(plan, onlyExposed, show) {
  const columns = [["collective", false], ["parameters", false], ["bytes", true], ["begins", true], ["takes", true],
    ["exposed", true], ["why", false]];
  const shown = plan.collectives.filter((each) => each.exposed || !onlyExposed);
  return element("table", { "aria-label": `Buckets of ${plan.name}` },
    element("thead", {}, element("tr", {}, ...columns.map((column) => heading(...column)))),
    ...plan.phases.map((phase) => element("tbody", {},
      element("tr", {}, element("th", { scope: "rowgroup", colspan: columns.length }, phase.name)),
      ...shown.filter((each) => each.phase === phase.name).map((each) => bucketRow(each, show)))));
}

function bucketRow(each, show) {
  const button = element("button", { type: "button" }, each.title);
  button.addEventListener("click", () => show(each));
  return element("tr", {},
    element("th", { scope: "row" }, button),
    element("td", { class: "parameters" }, parameterList(each)),
    numberCell(size(each.bytes)),
    numberCell(duration(each.begin)),
    numberCell(duration(each.end - each.begin)),
    numberCell(each.exposed ? duration(each.exposed) : "–", each.exposed ? "worse" : ""),
    element("td", { class: "reason" }, each.reason));
}

function parameterList({ params: names, title }) {
  if (names.length <= 1) return names[0] ?? "none of ours";
  const [module, inside] = inModule(names);
  const where = !module || title.includes(`[${module}]`) ? "" : ` of ${module}`;
  return element("details", {},
    element("summary", {}, `${names.length} parameters${where}`),
    element("ul", {}, ...inside.map((name) => element("li", {}, name))));
}
