// Draws the charts that the page describes in data-chart. A live page, which has data-every, fetches itself again.
"use strict";
(() => {
  const drawn = new Map();
  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue("--" + name).trim();
  const DAY = 86400;

  function seconds(value) {
    if (value === 0) return "0 s";
    if (Math.abs(value) < 1) return +(1000 * value).toPrecision(3) + " ms";
    if (value < 120) return +value.toPrecision(3) + " s";
    return value < 7200 ? +(value / 60).toPrecision(3) + " min" : +(value / 3600).toPrecision(3) + " h";
  }

  function moment(at, span) {
    const text = new Date(1000 * at).toISOString();
    return span > DAY ? text.slice(5, 16).replace("T", " ") : text.slice(11, 19);
  }

  // Times stand at full seconds, minutes, hours: the library's own ticks are decimal.
  const ROUND = [0.01, 0.1, 0.5, 1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 21600, 43200, DAY];
  function round(scale) {
    const [length, room] = [scale.max - scale.min, scale.chart.width / 90];
    const step = ROUND.find((one) => length / one <= room) || DAY * Math.ceil(length / DAY / room);
    scale.ticks = [];
    for (let at = Math.ceil(scale.min / step); at * step <= scale.max; at++) scale.ticks.push({ value: at * step });
  }

  function axis(unit, title, span) {
    const ticks = {
      time: (at) => moment(at, span()),
      seconds,
      step: (step) => (Number.isInteger(step) ? String(step) : null),
      number: (value) => +value.toPrecision(4),
    };
    return {
      ...(unit === "time" ? { afterBuildTicks: round } : {}),
      title: { display: Boolean(title), text: title, color: colour("faint") },
      ticks: { callback: ticks[unit], color: colour("faint"), maxRotation: 0, autoSkipPadding: 16 },
      grid: { color: colour("line") },
      border: { color: colour("line") },
    };
  }

  // Lines from top to bottom, where something happened.
  const marks = {
    id: "marks",
    beforeDatasetsDraw({ ctx, data, chartArea, scales }) {
      for (const one of data.datasets) {
        ctx.fillStyle = one.borderColor;
        for (const at of one.marks) ctx.fillRect(scales.x.getPixelForValue(at) - 1, chartArea.top, 2, chartArea.height);
      }
    },
  };

  function config(said) {
    const spans = said.lanes.length > 0;
    const marked = said.series.flatMap((one) => one.marks);
    const xs = said.series.flatMap((one) => one.data.flatMap((point) => point.x)).concat(marked);
    const span = () => Math.max(...xs) - Math.min(...xs);
    const x = { type: "linear", ...axis(said.x, said.xTitle, span) };
    const y = spans
      ? { type: "category", labels: said.lanes, ...axis("lane", "", span), grid: { display: false } }
      : { type: said.logarithmic ? "logarithmic" : "linear", ...axis(said.y, said.yTitle, span) };
    if (spans) {
      delete y.ticks.callback; // the labels are the lanes
      y.ticks.autoSkip = false;
      x.min = Math.min(...xs);
      x.max = Math.max(...xs);
      x.afterBuildTicks = round;
    } else if (marked.length) {
      x.suggestedMin = Math.min(...marked);
      x.suggestedMax = Math.max(...marked);
    }
    if (said.y === "step") y.ticks.precision = 0;
    const value = (unit, raw) => (unit === "seconds" ? seconds(raw) : String(+raw.toPrecision(6)));
    return {
      type: spans ? "bar" : "line",
      plugins: [marks],
      data: {
        datasets: said.series.map((one) => ({
          label: one.name,
          clip: 4, // what ends at the edge is seen
          data: one.data,
          marks: one.marks,
          backgroundColor: colour(one.colour),
          borderColor: colour(one.colour),
          borderWidth: spans ? 0 : 2,
          grouped: false,
          minBarLength: 3,
          barPercentage: 0.8,
          categoryPercentage: 0.9,
          pointRadius: one.data.length > 60 ? 0 : 2.5,
          pointHitRadius: 12,
        })),
      },
      options: {
        indexAxis: spans ? "y" : "x",
        animation: false,
        responsive: true,
        maintainAspectRatio: false,
        interaction: { mode: "nearest", axis: spans ? "xy" : "x", intersect: spans },
        scales: { x, y },
        plugins: {
          legend: {
            position: "bottom",
            align: "start",
            onClick: () => {},
            labels: { color: colour("ink"), boxWidth: 12, boxHeight: 12 },
          },
          tooltip: {
            callbacks: {
              title: (items) => {
                const raw = items[0] ? items[0].raw : null;
                if (spans || raw === null) return "";
                return said.x === "time" ? moment(raw.x, span()) + " UTC" : said.x + " " + raw.x;
              },
              label: (item) =>
                spans ? item.raw.text.match(/.{1,60}(\s|$)|.{1,60}/g) : `${item.dataset.label}: ${value(said.y, item.raw.y)}`,
            },
          },
        },
      },
    };
  }

  function draw(again) {
    for (const [canvas, chart] of drawn) {
      if (again || !canvas.isConnected) {
        chart.destroy();
        drawn.delete(canvas);
      }
    }
    for (const box of document.querySelectorAll("[data-chart]")) {
      const canvas = box.querySelector("canvas");
      if (!drawn.has(canvas)) drawn.set(canvas, new Chart(canvas, config(JSON.parse(box.dataset.chart))));
    }
  }

  // A part that is the same stays as it is: what is selected, scrolled or opened in it, too.
  function take(text) {
    const fresh = new DOMParser().parseFromString(text, "text/html").querySelector("main");
    const main = document.querySelector("main");
    const ids = (of) => [...of.children].map((part) => part.id).join();
    if (ids(fresh) !== ids(main)) {
      main.replaceWith(fresh);
    } else {
      for (const part of [...fresh.children]) { // a copy: a part that is taken over leaves it
        const old = document.getElementById(part.id);
        if (old.outerHTML === part.outerHTML) continue;
        const [box, shown] = [part, old].map((one) => one.querySelector("[data-chart]"));
        const canvas = old.querySelector("canvas");
        if (canvas && drawn.has(canvas)) {
          const next = config(JSON.parse(box.dataset.chart));
          shown.dataset.chart = box.dataset.chart;
          shown.firstElementChild.className = box.firstElementChild.className; // its height goes with the lanes
          Object.assign(drawn.get(canvas), { data: next.data, options: next.options });
          drawn.get(canvas).update("none");
        } else {
          old.replaceWith(part);
        }
      }
    }
    document.title = fresh.dataset.title || document.title;
    draw(false);
  }

  async function watch(main, every) {
    const said = document.getElementById("connection");
    let since = "";
    for (;;) {
      await new Promise((next) => setTimeout(next, every));
      if (document.hidden) continue;
      try {
        const answer = await fetch(main, { cache: "no-store", signal: AbortSignal.timeout(20000) });
        const text = await answer.text();
        if (!answer.ok) throw new Error(text);
        take(text);
        said.hidden = true;
      } catch (error) {
        if (said.hidden) since = moment(Date.now() / 1000, 0);
        said.hidden = false;
        said.textContent = `No answer since ${since} UTC; the page shows the state of then. ` + (error instanceof TypeError
          ? "Is holdfast status --web still running, and the ssh tunnel to it?" : error.message);
      }
    }
  }

  Chart.defaults.font.family = "system-ui, sans-serif";
  draw(false);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => draw(true));
  const { every, main } = document.body.dataset;
  if (every) watch(main, 1000 * every);
})();
