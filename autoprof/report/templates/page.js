"use strict";
// Draws plots when they come into view, in the colours of the theme; sorts tables; unfolds the target of a link.
(() => {
  const root = document.documentElement;
  const plots = JSON.parse(document.getElementById("plots").textContent);
  const drawn = new Set();
  const config = {
    displaylogo: false,
    responsive: true,
    modeBarButtonsToRemove: ["select2d", "lasso2d", "autoScale2d"],
    toImageButtonOptions: { format: "svg" },
  };

  // plotly.js is packed. The page's policy allows a script with its text.
  const unpack = async () => {
    const packed = Uint8Array.from(atob(document.getElementById("plotly").textContent), (each) => each.charCodeAt(0));
    const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
    const script = document.createElement("script");
    script.textContent = await new Response(stream).text();
    document.body.append(script);
    script.remove();
  };

  // A colour "@name" is the style sheet's --name.
  const coloured = (value, key, styles) => {
    if (typeof value === "string") {
      return /color$/i.test(key) && value.startsWith("@")
        ? styles.getPropertyValue("--" + value.slice(1)).trim()
        : value;
    }
    if (Array.isArray(value)) {
      return key === "x" || key === "y" ? value : value.map((each) => coloured(each, key, styles));
    }
    if (value === null || typeof value !== "object") {
      return value;
    }
    return Object.fromEntries(Object.entries(value).map(([name, each]) => [name, coloured(each, name, styles)]));
  };

  const draw = (place) => {
    const plot = plots[place.dataset.plot];
    if (!plot) {
      return;
    }
    const { data, layout } = coloured(plot, "", getComputedStyle(root));
    drawn.add(place);
    Plotly.react(place, data, layout, config);
  };

  const visible = new IntersectionObserver(
    (entries) => {
      for (const { isIntersecting, target } of entries) {
        if (isIntersecting) {
          visible.unobserve(target);
          draw(target);
        }
      }
    },
    { rootMargin: "300px" },
  );
  for (const place of document.querySelectorAll(".plot")) {
    const plot = plots[place.dataset.plot];
    if (plot) {
      place.style.minHeight = plot.layout.height + "px";
    } else {
      place.remove();
    }
  }
  unpack().then(() => document.querySelectorAll(".plot").forEach((place) => visible.observe(place)));

  // When printing, nothing scrolls into view, so draw everything.
  addEventListener("beforeprint", () => {
    for (const place of document.querySelectorAll(".plot")) {
      if (window.Plotly && !drawn.has(place) && place.offsetParent) {
        visible.unobserve(place);
        draw(place);
      }
    }
  });

  // The theme: the system's, light or dark.
  const themes = ["system", "light", "dark"];
  const button = document.getElementById("theme");
  const remembered = () => {
    try {
      return localStorage.getItem("autoprof-theme");
    } catch {
      return null;
    }
  };
  const wear = (theme) => {
    root.dataset.theme = theme;
    button.textContent = "Theme: " + theme;
    drawn.forEach(draw);
  };
  button.addEventListener("click", () => {
    const theme = themes[(themes.indexOf(root.dataset.theme) + 1) % themes.length];
    try {
      localStorage.setItem("autoprof-theme", theme);
    } catch {
      // A page opened from a file may have no storage; the choice then applies to this page only.
    }
    wear(theme);
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => drawn.forEach(draw));
  wear(themes.includes(remembered()) ? remembered() : "system");

  // Tables: the button of a column sorts by it; a second click reverses the order.
  const values = (row, column) => {
    const cell = row.cells[column];
    if ("value" in cell.dataset) {
      return cell.dataset.value === "" ? null : Number(cell.dataset.value);
    }
    return cell.textContent.trim();
  };
  const compared = (a, b) =>
    typeof a === "string" ? a.localeCompare(b, undefined, { numeric: true }) : a - b;
  const sort = (table, column) => {
    const header = table.tHead.rows[0].cells[column];
    const number = header.classList.contains("number");
    const before = header.getAttribute("aria-sort");
    const order = before ? (before === "ascending" ? "descending" : "ascending") : number ? "descending" : "ascending";
    const way = order === "ascending" ? 1 : -1;
    for (const cell of table.tHead.rows[0].cells) {
      cell.removeAttribute("aria-sort");
    }
    header.setAttribute("aria-sort", order);
    const rows = Array.from(table.tBodies[0].rows, (row) => [values(row, column), row]);
    // Rows without a value come last in both orders.
    rows.sort(([a], [b]) => (a === null || b === null ? (a === null) - (b === null) : way * compared(a, b)));
    table.tBodies[0].append(...rows.map(([, row]) => row));
  };
  for (const table of document.querySelectorAll("table.sortable")) {
    Array.from(table.tHead.rows[0].cells).forEach((cell, column) => {
      cell.querySelector("button")?.addEventListener("click", () => sort(table, column));
    });
  }

  // Unfold the target of a link.
  const show = () => {
    const target = location.hash && document.getElementById(decodeURIComponent(location.hash.slice(1)));
    if (target && target.tagName === "DETAILS") {
      target.open = true;
      target.scrollIntoView();
    }
  };
  addEventListener("hashchange", show);
  show();
})();
