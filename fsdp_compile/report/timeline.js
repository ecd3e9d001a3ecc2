// One plan as a chart: a lane of compute with its stalls, one for each process group, and the memory below.

const LANE = 34, MEMORY = 150, TOP = 8, GAP = 22, AXIS = 26, SLIDER = 30; // heights, pixels
const MOST_NAMED = 8; // parameters in a tooltip

const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
const colourOf = (kind) => colour(kind.replaceAll("_", "-")) || colour("other");

// All bars of a plan: what is shown about each is in `heading` and `facts`.
function barsOf(plan) {
  const compute = plan.compute.map((span) => ({ ...span, lane: 0, kind: "compute",
    heading: `compute, ${duration(span.end - span.begin)}`,
    facts: [
      `${count(span.kernels)} ${span.kernels === 1 ? "kernel" : "kernels"} from ${duration(span.begin)}`,
      `longest: ${span.longest.map(([name, time]) => `${name} ${duration(time)}`).join(", ")}`,
    ] }));
  const stalls = plan.collectives.filter((each) => each.exposed && each.waited !== null).map((each) => ({
    lane: 0, kind: "stall", begin: each.waited, end: each.waited + each.exposed,
    heading: `compute stands still, ${duration(each.exposed)}`,
    facts: [`for ${each.title}`, `why: ${each.reason}`] }));
  const collectives = plan.collectives.map((each) => ({ ...each, lane: plan.lanes.indexOf(each.lane),
    collective: each, heading: `${each.title}, ${duration(each.end - each.begin)}`, facts: factsOf(each) }));
  return [...compute, ...stalls, ...collectives].sort((one, other) => one.begin - other.begin || one.lane - other.lane);
}

function factsOf(each) {
  const [module, inside] = each.params.length ? inModule(each.params) : ["", []];
  const named = inside.slice(0, MOST_NAMED).join(", ");
  const more = each.params.length > MOST_NAMED ? ` and ${each.params.length - MOST_NAMED} more` : "";
  return [
    `${size(each.bytes)}, ${each.phase}, from ${duration(each.begin)} to ${duration(each.end)}`,
    `parameters${module && ` of ${module}`}: ${named || "none of ours"}${more}`,
    each.exposed ? `exposed ${duration(each.exposed)}: ${each.reason}` : "hidden behind compute",
  ];
}

const describe = (bar) => [element("strong", {}, bar.heading), ...bar.facts.map((fact) => element("div", {}, fact))];

class PlanChart {
  // `until` is the end of the time axis, the same for charts that are compared.
  constructor(parent, plan, memory, until) {
    Object.assign(this, { plan, memory, until, bars: barsOf(plan), selected: null });
    const lanes = plan.lanes.length * LANE;
    this.details = element("div", { class: "details", "aria-live": "polite" }, "No bar is chosen.");
    this.canvas = element("div", { class: "chart", role: "application", tabindex: "0", "aria-label": this.label() });
    this.canvas.style.height = `${TOP + lanes + GAP + MEMORY + AXIS + SLIDER}px`;
    parent.append(element("h3", {}, plan.name), this.canvas, this.details);
    this.chart = echarts.init(this.canvas);
    this.draw();
    this.chart.on("click", { seriesIndex: 0 }, ({ dataIndex }) => this.select(dataIndex));
    this.canvas.addEventListener("keydown", (event) => this.onKey(event));
  }

  label() {
    const { plan } = this;
    const exposed = plan.collectives.filter((each) => each.exposed).length;
    return `Timeline of ${plan.name}: a step of ${duration(plan.step)} with ${duration(plan.computing)} of compute, ` +
      `${plan.collectives.length} collectives of which ${exposed} are exposed, and at most ${size(plan.peak)} of ` +
      `memory at ${duration(plan.peakAt)}. Arrow keys go through the bars; the tables below say the same.`;
  }

  // Also when the colours change.
  draw() {
    const narrow = this.canvas.clientWidth < 600;
    const lanes = this.plan.lanes.length * LANE;
    const sides = { left: narrow ? 66 : 90, right: narrow ? 10 : 24 };
    const text = { color: colour("muted"), fontFamily: "inherit", fontSize: 12 };
    const time = { type: "value", min: 0, max: this.until,
      axisPointer: { show: true, snap: false, // brings the tooltip of the memory
        label: { show: false } },
      splitLine: { lineStyle: { color: colour("line") } }, splitNumber: narrow ? 3 : 8 };
    this.chart.setOption({
      animation: false,
      textStyle: { fontFamily: getComputedStyle(document.body).fontFamily },
      grid: [
        { ...sides, top: TOP, height: lanes },
        { ...sides, top: TOP + lanes + GAP, height: MEMORY },
      ],
      xAxis: [
        { ...time, axisPointer: { show: false }, gridIndex: 0, axisLabel: { show: false }, axisTick: { show: false } },
        { ...time, gridIndex: 1, axisLabel: { ...text, formatter: (time) => this.timeLabel(time), showMaxLabel: false } },
      ],
      yAxis: [
        { type: "category", inverse: true, data: this.plan.lanes, axisTick: { show: false }, axisLine: { show: false },
          axisLabel: { ...text, width: sides.left - 12, overflow: "truncate" } },
        { type: "value", gridIndex: 1, min: 0, max: this.ceiling(), interval: this.ceiling() / 4,
          axisLabel: { ...text, formatter: (bytes) => size(bytes).replace(".00", "") },
          splitLine: { lineStyle: { color: colour("line") } } },
      ],
      dataZoom: [
        { type: "inside", xAxisIndex: [0, 1], filterMode: "none", zoomOnMouseWheel: "ctrl", moveOnMouseMove: true,
          preventDefaultMouseMove: false },
        { type: "slider", xAxisIndex: [0, 1], filterMode: "none", height: 18, bottom: 6, ...sides, showDetail: false,
          showDataShadow: false, brushSelect: false, borderColor: colour("line"), fillerColor: `${colour("accent")}33`,
          handleStyle: { color: colour("surface"), borderColor: colour("muted") },
          moveHandleStyle: { color: colour("muted") } },
      ],
      tooltip: { confine: true, showContent: !narrow, transitionDuration: 0, padding: [6, 10],
        backgroundColor: colour("surface"), borderColor: colour("line"),
        textStyle: { color: colour("text"), fontSize: 13 },
        formatter: (shown) => element("div", { class: "tip" }, ...(Array.isArray(shown)
          ? this.memoryAt(shown[0].dataIndex) : describe(this.bars[shown.dataIndex]))) },
      series: [this.barSeries(), ...this.memorySeries()],
    }, { replaceMerge: ["series"] });
  }

  timeLabel(time) {
    const [unit, name] = this.until < 2e3 ? [1, "µs"] : [1e3, "ms"];
    return `${Number((time / unit).toPrecision(4))} ${name}`;
  }

  // The top of the memory axis, in quarters of a power of two; what the device has is seen unless it is far above.
  ceiling() {
    const { peak } = this.plan;
    const most = this.memory && this.memory < 2 * peak ? Math.max(peak, this.memory) : peak;
    const quarter = 2 ** Math.floor(Math.log2(most)) / 4;
    return Math.ceil((most * 1.02) / quarter) * quarter;
  }

  barSeries() {
    const colours = new Map();
    const fill = (kind) => colours.get(kind) ?? colours.set(kind, colourOf(kind)).get(kind);
    const boundary = this.plan.phases.slice(1).map((phase) => ({ xAxis: phase.begin, name: phase.name }));
    return {
      type: "custom", name: "bars", clip: true, progressive: 0, encode: { x: [1, 2], y: 0 },
      data: this.bars.map((bar) => [bar.lane, bar.begin, bar.end]),
      renderItem: (params, api) => this.renderBar(params, api, fill),
      markLine: { silent: true, symbol: "none", lineStyle: { color: colour("muted"), type: "dashed" },
        label: { show: false }, data: boundary },
    };
  }

  // A bar; of a collective, a stripe below marks the end that is exposed.
  renderBar({ coordSys, dataIndex }, api, fill) {
    const bar = this.bars[dataIndex];
    const [left, middle] = api.coord([bar.begin, bar.lane]);
    const right = api.coord([bar.end, bar.lane])[0];
    if (right < coordSys.x || left > coordSys.x + coordSys.width) return null;
    const height = LANE * 0.68, top = middle - height / 2;
    const rect = (x, y, tall, style) => ({ type: "rect", style,
      shape: echarts.graphic.clipRectByRect({ x, y, width: Math.max(right - x, 1), height: tall }, coordSys) });
    const chosen = dataIndex === this.selected;
    const outline = chosen ? { stroke: colour("text"), lineWidth: 2 } : right - left > 4
      ? { stroke: colour("background"), lineWidth: 0.5 } : {};
    const parts = [rect(left, top, height, { fill: fill(bar.kind), ...outline })];
    if (bar.collective && bar.exposed) {
      const from = api.coord([Math.max(bar.begin, bar.end - bar.exposed), bar.lane])[0];
      parts.push(rect(from, top + height, 4, { fill: fill("stall") }));
    }
    return { type: "group", children: parts.filter((each) => each.shape) }; // without what lies outside
  }

  memorySeries() {
    const { times, bytes } = this.plan.live;
    const end = { symbol: "none", silent: true, lineStyle: { color: colour("text"), type: "dotted" } };
    const text = { color: colour("text"), fontSize: 12 };
    const names = Object.keys(bytes).filter((name) => bytes[name].some((each) => each));
    return names.map((name, index) => ({
      type: "line", name, stack: "memory", step: "end", symbol: "none", xAxisIndex: 1, yAxisIndex: 1, silent: true,
      lineStyle: { width: 0 },
      areaStyle: { color: colour(`memory-${Object.keys(bytes).indexOf(name)}`), opacity: 0.85 },
      data: times.map((time, moment) => [time, bytes[name][moment]]),
      ...(index === 0 && { markLine: { ...end, label: { ...text, position: "insideEndTop" }, data: [
        { xAxis: this.plan.peakAt, label: { formatter: "peak", position: "end", distance: 2 } },
        ...(this.memory ? [{ yAxis: this.memory, label: { formatter: "device" } }] : []),
      ] } }),
    }));
  }

  memoryAt(moment) {
    const { times, bytes } = this.plan.live;
    const held = Object.entries(bytes).filter(([, sizes]) => sizes[moment]);
    return [
      element("strong", {}, `${size(sum(held.map(([, sizes]) => sizes[moment])))} at ${duration(times[moment])}`),
      ...held.map(([name, sizes]) => element("div", {}, `${name}: ${size(sizes[moment])}`)),
    ];
  }

  // -- what is chosen, and what is seen ---------------------------------------------------------------------------

  get window() {
    const { startValue, endValue } = this.chart.getOption().dataZoom[0];
    return [startValue, endValue];
  }

  set window([from, to]) {
    const wide = Math.min(Math.max(to - from, this.until * 1e-5), this.until);
    const begin = Math.min(Math.max(from, 0), this.until - wide);
    this.chart.dispatchAction({ type: "dataZoom", startValue: begin, endValue: begin + wide });
  }

  follow([from, to]) {
    const [begin, end] = this.window;
    if (begin !== from || end !== to) this.window = [from, to];
  }

  zoom(factor) {
    const [from, to] = this.window;
    const bar = this.bars[this.selected];
    const middle = bar && bar.begin <= to && bar.end >= from ? (bar.begin + bar.end) / 2 : (from + to) / 2;
    const half = ((to - from) / 2) * factor;
    this.window = [middle - half, middle + half];
  }

  showAll() {
    this.window = [0, this.until];
  }

  // Moves the window if the bar is outside of it.
  select(index) {
    this.selected = index;
    const bar = this.bars[index], [from, to] = this.window;
    if (bar.begin < from || bar.end > to) {
      const wide = Math.max(to - from, (bar.end - bar.begin) * 1.5), middle = (bar.begin + bar.end) / 2;
      this.window = [middle - wide / 2, middle + wide / 2];
    }
    this.chart.setOption({ series: [this.barSeries()] });
    this.chart.dispatchAction({ type: "showTip", seriesIndex: 0, dataIndex: index });
    this.details.replaceChildren(...describe(bar));
  }

  leave() {
    this.selected = null;
    this.chart.setOption({ series: [this.barSeries()] });
    this.chart.dispatchAction({ type: "hideTip" });
    this.details.replaceChildren("No bar is chosen.");
  }

  // Zooms in on a collective as well.
  show(collective) {
    const wide = (collective.end - collective.begin) * 8, middle = (collective.begin + collective.end) / 2;
    this.window = [middle - wide / 2, middle + wide / 2];
    this.select(this.bars.findIndex((bar) => bar.collective === collective));
    this.canvas.focus();
  }

  onKey(event) {
    const action = {
      ArrowRight: () => this.step(1), ArrowLeft: () => this.step(-1),
      ArrowDown: () => this.changeLane(1), ArrowUp: () => this.changeLane(-1),
      "+": () => this.zoom(0.5), "=": () => this.zoom(0.5), "-": () => this.zoom(2),
      0: () => this.showAll(), Escape: () => this.leave(),
    }[event.key];
    if (!action || event.altKey || event.ctrlKey || event.metaKey) return;
    event.preventDefault();
    action();
  }

  step(direction) {
    const lane = this.bars[this.selected]?.lane ?? 0;
    let index = this.selected ?? (direction > 0 ? -1 : this.bars.length);
    do index += direction; while (this.bars[index] && this.bars[index].lane !== lane);
    if (this.bars[index]) this.select(index);
  }

  // To the bar nearest in time.
  changeLane(direction) {
    const { lane, begin } = this.bars[this.selected] ?? { lane: 0, begin: 0 };
    const there = this.bars.map((_, index) => index).filter((index) => this.bars[index].lane === lane + direction);
    const away = (index) => Math.abs(this.bars[index].begin - begin);
    if (there.length) this.select(there.reduce((best, index) => (away(index) < away(best) ? index : best)));
  }
}
