// Draws the page's figures with plotly, over epochs, steps or time. The colours of axes and text are in report.css.
"use strict";
(function () {
  const page = JSON.parse(document.getElementById("figures").textContent);
  const paperWidth = 660; // pixels that a sheet of A4 has between its margins, and the frame of a figure
  const config = {
    displayModeBar: false, // a drag zooms, a double click takes it back
    responsive: true,
  };

  const switchable = (x) => x !== undefined && !Array.isArray(x);

  function titleOf(over) {
    return over === "time" ? "time, " + page.unit : over;
  }

  // From the run's beginning in all figures alike; a picture of colours ends where they end.
  function rangeOf(figure, over) {
    if (figure.data.some((trace) => trace.type === "heatmap")) return undefined;
    let last = 0;
    for (const trace of figure.data) {
      for (const place of trace.x[over]) last = Math.max(last, place);
    }
    return last > 0 ? [0, last * 1.02] : undefined;
  }

  function layoutOf(figure, over) {
    const layout = structuredClone(figure.layout);
    const legend = { orientation: "h", x: 0, y: 1.02, yanchor: "bottom", font: { size: 12 } };
    const base = {
      height: 300,
      margin: { l: 8, r: 12, t: 12, b: 8 },
      font: { family: "system-ui, sans-serif", size: 12 },
      paper_bgcolor: "rgba(0,0,0,0)",
      plot_bgcolor: "rgba(0,0,0,0)",
      hoverlabel: { namelength: -1 },
      xaxis: { automargin: true, zeroline: false, spikethickness: 1, spikedash: "solid", spikecolor: "#888" },
    };
    if (figure.data.some((trace) => switchable(trace.x))) {
      base.xaxis.title = { text: titleOf(over) };
      base.xaxis.range = rangeOf(figure, over);
    }
    layout.legend = Object.assign(legend, layout.legend);
    layout.shapes = figure.marks
      .filter((mark) => mark[over] !== null)
      .map((mark) => ({
        type: "line", layer: "below", yref: "paper", y0: 0, y1: 1, x0: mark[over], x1: mark[over],
        line: { width: 1, dash: "dot" },
      }));
    return Object.assign(base, layout, { xaxis: Object.assign(base.xaxis, layout.xaxis) });
  }

  function dataOf(figure, over) {
    return figure.data.map((trace) => (switchable(trace.x) ? Object.assign({}, trace, { x: trace.x[over] }) : trace));
  }

  function draw(over) {
    for (const figure of page.figures) {
      Plotly.react(document.getElementById("plot-" + figure.key), dataOf(figure, over), layoutOf(figure, over), config);
    }
  }

  function forPaper(printing) {
    for (const figure of page.figures) {
      const size = printing ? { width: paperWidth, autosize: false } : { width: null, autosize: true };
      Plotly.relayout(document.getElementById("plot-" + figure.key), size);
    }
  }

  draw("epoch");
  for (const choice of document.querySelectorAll("input[name=over]")) {
    choice.addEventListener("change", () => draw(choice.value));
  }
  window.addEventListener("beforeprint", () => forPaper(true));
  window.addEventListener("afterprint", () => forPaper(false));
})();
