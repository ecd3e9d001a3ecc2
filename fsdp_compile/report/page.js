// Which plans are shown, and all that is drawn of them.

const { plans, memory } = JSON.parse(document.getElementById("data").textContent);
const $ = (id) => document.getElementById(id);
const dark = matchMedia("(prefers-color-scheme: dark)");
let charts = [];

function shownPlans() {
  const second = $("second").value;
  return [plans[$("first").value], ...(second ? [plans[second]] : [])];
}

function render() {
  const shown = shownPlans();
  $("sharding").textContent = `Sharded: ${[...new Set(shown.map((plan) => plan.sharding))].join("; ")}.`;
  $("summary-table").replaceChildren(...summaryTable(shown, memory));
  $("peak-table").replaceChildren(...peakTable(shown));
  renderTimelines(shown);
  renderBuckets(shown);
}

function renderTimelines(shown) {
  for (const { chart } of charts) chart.dispose();
  $("timelines").replaceChildren();
  renderLegend(shown);
  const until = Math.max(...shown.map((plan) => plan.step));
  charts = shown.map((plan) => new PlanChart($("timelines"), plan, memory, until));
  for (const each of charts) each.chart.on("datazoom", () => charts.forEach((other) => other.follow(each.window)));
}

function renderLegend(shown) {
  const kinds = new Set(shown.flatMap((plan) => plan.collectives.map((each) => each.kind)));
  const held = shown[0].live.bytes;
  const bars = [["compute", "compute"], ["stall", "compute stands still: exposed"],
    ...[...kinds].map((kind) => [kind.replaceAll("_", "-"), kind.replaceAll("_", "-")])];
  const categories = Object.keys(held).map((name, index) => [`memory-${index}`, name])
    .filter(([, name]) => shown.some((plan) => plan.live.bytes[name].some((each) => each)));
  $("bar-legend").replaceChildren(...bars.map(legendEntry));
  $("memory-legend").replaceChildren(...categories.map(legendEntry));
}

function legendEntry([colourName, text]) {
  const swatch = element("span", { class: "swatch" });
  swatch.style.background = `var(--${colourName}, var(--other))`;
  return element("li", {}, swatch, text);
}

function renderBuckets(shown) {
  const onlyExposed = $("only-exposed").checked;
  $("buckets").className = shown.length > 1 ? "two" : "";
  $("buckets").replaceChildren(...shown.map((plan, index) => {
    const table = bucketTable(plan, onlyExposed, (collective) => {
      charts[index].show(collective);
      charts[index].canvas.scrollIntoView({ block: "nearest" });
    });
    const label = `Buckets of ${plan.name}, to scroll`;
    const frame = element("div", { class: "wide tall", tabindex: "0", role: "group", "aria-label": label }, table);
    return element("div", {}, element("h3", {}, plan.name), frame);
  }));
}

function fillChoice() {
  const option = (name, value) => element("option", { value }, name);
  $("first").append(...plans.map((plan, index) => option(plan.name, index)));
  $("second").append(option("none", ""), ...plans.map((plan, index) => option(plan.name, index)));
  $("second").value = plans.length > 1 ? "1" : "";
  $("overview").hidden = plans.length === 1;
  $("overview-table").append(...overviewTable(plans, memory));
  $("choice").addEventListener("change", render);
}

fillChoice();
render();
$("only-exposed").addEventListener("change", () => renderBuckets(shownPlans()));
for (const button of document.querySelectorAll("[data-zoom]")) {
  // The charts zoom together: what the first one does, the other follows.
  const { zoom } = button.dataset;
  button.addEventListener("click", () => (zoom === "all" ? charts[0].showAll() : charts[0].zoom(Number(zoom))));
}
dark.addEventListener("change", () => charts.forEach((each) => each.draw()));
addEventListener("resize", () => charts.forEach((each) => { each.chart.resize(); each.draw(); }));
