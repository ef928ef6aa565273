// What the console adds where there are scripts: charts that move, copying, and word of a gateway that does not answer.
// Every page works without it.
"use strict";

(() => {
  const EVERY_MS = 5000;
  const charts = new Map();

  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const clear = (hex, alpha) => hex + Math.round(alpha * 255).toString(16).padStart(2, "0");
  const short = (value) => {
    if (value === null || value === undefined) return "";
    if (value >= 1e6) return +(value / 1e6).toFixed(1) + "M";
    if (value >= 1e4) return +(value / 1e3).toFixed(0) + "k";
    if (value >= 1e3) return +(value / 1e3).toFixed(1) + "k";
    return String(+value.toFixed(value < 10 ? 2 : 1));
  };

  // Each chart: which series of the data, how they are drawn, what the axis says, and up to where it reaches at least.
  const kinds = {
    traffic: {
      stacked: true, least: 1, say: short,
      series: [["ran", "--chart-ran"], ["replayed", "--chart-replayed"], ["refused", "--chart-refused"],
               ["open", "--chart-open"], ["passed", "--chart-passed"]],
    },
    rates: {
      least: 15, say: (value) => short(value) + "%",
      series: [["hit_percent", "--chart-replayed"], ["conflict_percent", "--chart-refused"]],
      limits: [[10, "--chart-replayed"], [5, "--chart-refused"]],
    },
    trouble: {
      least: 1, say: short, bars: true,
      series: [["fallbacks", "--chart-refused"], ["unknown", "--chart-open"]],
      limits: [[0, "--chart-limit"]],
    },
    overhead: {
      least: 1, say: (value) => short(value) + " ms",
      series: [["overhead_p50_ms", "--chart-ran"], ["overhead_p99_ms", "--chart-passed"]],
    },
  };

  const columns = (kind, data) => {
    const rows = kind.series.map(([name]) => data[name]);
    if (!kind.stacked) return [data.at, ...rows];
    const sum = new Array(data.at.length).fill(0);
    const stack = rows.map((row) => row.map((value, at) => (sum[at] += value)));
    // The tallest first, so that the others are painted over it.
    return [data.at, ...stack.reverse()];
  };

  const limits = (kind) => ({
    hooks: {
      draw: [(plot) => {
        for (const [value, name] of kind.limits || []) {
          const { left, width } = plot.bbox;
          const y = plot.valToPos(value, "y", true);
          plot.ctx.save();
          plot.ctx.strokeStyle = colour(name);
          plot.ctx.setLineDash([5 * devicePixelRatio, 4 * devicePixelRatio]);
          plot.ctx.lineWidth = devicePixelRatio;
          plot.ctx.beginPath();
          plot.ctx.moveTo(left, y);
          plot.ctx.lineTo(left + width, y);
          plot.ctx.stroke();
          plot.ctx.restore();
        }
      }],
    },
  });

  const options = (kind, place) => {
    const order = kind.stacked ? [...kind.series].reverse() : kind.series;
    const series = order.map(([name, token]) => ({
      label: name,
      stroke: colour(token),
      width: kind.stacked ? 1 : 1.5,
      fill: kind.stacked ? colour(token) : kind.bars ? clear(colour(token), 0.6) : undefined,
      points: { show: false },
      spanGaps: false,
      ...(kind.bars ? { paths: uPlot.paths.bars({ size: [0.9, 24] }) } : {}),
    }));
    const axis = { stroke: colour("--faint"), font: "11px system-ui, sans-serif", ticks: { show: false } };
    return {
      width: place.clientWidth - 14,
      height: 160,
      // To the right half a label has room.
      padding: [8, 24, 0, 0],
      legend: { show: false },
      cursor: { show: false },
      scales: { y: { range: (_, low, high) => [0, Math.max(kind.least, (high || 0) * 1.1)] } },
      axes: [
        { ...axis, grid: { show: false }, size: 26, space: 70, values: (_, ticks) => ticks.map(clock(ticks)) },
        { ...axis, grid: { stroke: colour("--line"), width: 1 }, size: 52, space: 34,
          // Bars are counts: there is no half of one.
          ...(kind.bars ? { incrs: [1, 2, 5, 10, 20, 50, 100, 200, 500, 1e3, 1e4, 1e5, 1e6] } : {}),
          values: (_, ticks) => ticks.map(kind.say) },
      ],
      series: [{}, ...series],
      plugins: [limits(kind)],
    };
  };

  const clock = (ticks) => {
    const seconds = ticks.some((tick) => tick % 60 !== 0);
    return (tick) => new Date(tick * 1000).toLocaleTimeString([], {
      hour: "2-digit", minute: "2-digit", second: seconds ? "2-digit" : undefined, hour12: false,
    });
  };

  const draw = (data) => {
    for (const place of document.querySelectorAll("[data-chart]")) {
      const kind = kinds[place.dataset.chart];
      const shown = columns(kind, data);
      const known = charts.get(place);
      if (known) {
        known.setData(shown);
      } else {
        place.hidden = false;
        charts.set(place, new uPlot(options(kind, place), shown, place));
      }
    }
  };

  const anew = () => {
    for (const [place, chart] of charts) {
      chart.destroy();
      charts.delete(place);
    }
    look();
  };

  let asking = false;
  const look = async () => {
    const from = document.querySelector("[data-series]");
    if (!from || asking || document.hidden || !window.uPlot) return;
    asking = true;
    try {
      const answer = await fetch(from.dataset.series, { headers: { "HX-Request": "true" }, cache: "no-store" });
      if (answer.status === 401) {
        location.assign(answer.headers.get("HX-Redirect") || "/login");
        return;
      }
      if (answer.ok) draw(await answer.json());
      reached(answer.ok);
    } catch {
      reached(false);
    } finally {
      asking = false;
    }
  };

  // Says that what is shown is old.
  const reached = (well) => {
    const said = document.getElementById("unreached");
    if (!said) return;
    if (well) {
      said.hidden = true;
      said.dataset.since = "";
    } else if (said.hidden) {
      said.dataset.since = new Date().toLocaleTimeString([], { hour12: false });
      said.querySelector("[data-when]").textContent = said.dataset.since;
      said.hidden = false;
    }
  };
  document.addEventListener("htmx:sendError", () => reached(false));
  document.addEventListener("htmx:afterOnLoad", () => reached(true));
  // A part in which somebody moves by keyboard, or has selected something, is not taken from under their hands.
  const inUse = (part) => part.querySelector("input:checked") || part.contains(document.activeElement) || getSelection().containsNode(part, true) && !getSelection().isCollapsed;
  document.addEventListener("htmx:beforeRequest", (event) => {
    if (document.hidden || [...document.querySelectorAll("[data-live]")].some(inUse)) event.preventDefault();
  });

  document.addEventListener("click", async (event) => {
    const button = event.target.closest("[data-copy]");
    if (!button || !navigator.clipboard) return;
    await navigator.clipboard.writeText(button.dataset.copy);
    const before = button.textContent;
    button.textContent = "Copied";
    setTimeout(() => { button.textContent = before; }, 1200);
  });

  // Fields of an answer that does not exist are hidden.
  const showAnswerFields = () => {
    const chosen = document.querySelector("input[name=as]:checked");
    document.querySelectorAll("[data-if-done]").forEach((part) => { part.hidden = chosen?.value === "not-executed"; });
  };
  document.addEventListener("change", showAnswerFields);

  const start = () => {
    showAnswerFields();
    // On a phone the navigation bar is wider than the screen.
    document.querySelector("nav [aria-current]")?.scrollIntoView({ block: "nearest", inline: "center" });
    if (navigator.clipboard) document.querySelectorAll("[data-copy]").forEach((button) => { button.hidden = false; });
    look();
    setInterval(look, EVERY_MS);
    let late;
    addEventListener("resize", () => { clearTimeout(late); late = setTimeout(anew, 150); });
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", anew);
    document.addEventListener("visibilitychange", look);
  };
  if (document.readyState === "loading") document.addEventListener("DOMContentLoaded", start);
  else start();
})();
