"use strict";
(() => {
  document.documentElement.classList.add("js");
  const named = () => {
    const style = getComputedStyle(document.documentElement);
    const resolve = (value) => {
      if (typeof value === "string") return value.startsWith("$") ? style.getPropertyValue("--" + value.slice(1)).trim() : value;
      if (Array.isArray(value)) return value.map(resolve);
      if (value && typeof value === "object") return Object.fromEntries(Object.entries(value).map(([k, v]) => [k, resolve(v)]));
      return value;
    };
    return resolve;
  };
  const axis = { gridcolor: "$grid", linecolor: "$line", zerolinecolor: "$line", automargin: true, title: { standoff: 6 } };
  const shared = {
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", margin: { l: 8, r: 12, t: 8, b: 8 }, height: 320,
    legend: { orientation: "h", xref: "container", x: 0, xanchor: "left", yref: "container", y: 0, yanchor: "bottom", traceorder: "normal" }, hoverlabel: { namelength: -1 },
  };
  const layoutOf = (figure, resolve, narrow) => {
    const layout = { ...shared, ...figure.layout };
    layout.font = { family: getComputedStyle(document.body).fontFamily, size: 12, color: "$ink" };
    layout.hoverlabel = { ...shared.hoverlabel, bgcolor: "$card", bordercolor: "$line", font: { color: "$ink" } };
    layout.legend = { ...shared.legend, ...figure.layout.legend };
    for (const key of new Set(["xaxis", "yaxis", ...Object.keys(layout).filter((k) => /^[xy]axis\d*$/.test(k))]))
      layout[key] = { ...axis, ...layout[key], title: { ...axis.title, ...layout[key]?.title } };
    if (narrow) layout.height *= 1.15;
    return resolve(layout);
  };
  const draw = (chart) => {
    const figure = JSON.parse(chart.nextElementSibling.textContent), resolve = named(), narrow = chart.clientWidth < 480;
    const data = figure.data.filter((trace) => !(narrow && trace.mode === "text" && trace.x.length > 6)); // they would overlap
    Plotly.react(chart, resolve(data), layoutOf(figure, resolve, narrow), { responsive: true, displaylogo: false, displayModeBar: false });
  };
  const visible = () => [...document.querySelectorAll("[data-chart]")].filter((chart) => chart.offsetParent !== null);
  for (const select of document.querySelectorAll("select[data-panels]")) {
    const panels = [...select.closest("section").querySelectorAll("[data-panel]")];
    const show = () => {
      for (const panel of panels) panel.hidden = panel.dataset.panel !== select.value;
      visible().filter((chart) => select.closest("section").contains(chart)).forEach(draw);
    };
    select.addEventListener("change", show);
    for (const panel of panels) panel.hidden = panel.dataset.panel !== select.value;
  }
  const all = () => visible().forEach(draw);
  for (const query of ["(prefers-color-scheme: dark)", "print"]) matchMedia(query).addEventListener("change", all);
  for (const details of document.querySelectorAll("details"))
    details.addEventListener("toggle", () => visible().filter((chart) => details.contains(chart)).forEach(draw));
  all();
})();
