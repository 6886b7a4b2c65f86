"use strict";
(function () {
  const said = document.getElementById("said");

  // Sorting: a click on a header; baseline lines stay on top, empty cells at the end.
  for (const table of document.querySelectorAll("table")) {
    const heads = [...table.tHead.rows[0].cells];
    const body = table.tBodies[0];
    heads.forEach((head, place) => {
      const button = head.querySelector("button");
      if (!button) return;
      button.addEventListener("click", () => {
        const up = head.getAttribute("aria-sort") !== "ascending";
        for (const other of heads) other.removeAttribute("aria-sort");
        head.setAttribute("aria-sort", up ? "ascending" : "descending");
        const lines = [...body.rows].sort((one, other) => compare(one, other, place, up));
        body.append(...lines);
        said.textContent = `Sorted by ${button.dataset.name}, ${up ? "ascending" : "descending"}`;
      });
    });
  }

  function compare(one, other, place, up) {
    const pinned = other.classList.contains("baseline") - one.classList.contains("baseline");
    if (pinned) return pinned;
    const [a, b] = [one.cells[place].dataset.key, other.cells[place].dataset.key];
    if (a === "" || b === "") return (a === "") - (b === "");
    const [x, y] = [Number(a), Number(b)];
    const order = Number.isNaN(x) || Number.isNaN(y) ? a.localeCompare(b, "en", { numeric: true }) : x - y;
    return up ? order : -order;
  }

  // Filtering: one form for all tables; the baseline stays, and so does everything on paper.
  const form = document.getElementById("filters");
  if (form) {
    const [text, budget] = [document.getElementById("filter"), document.getElementById("filter-budget")];
    const boxes = [...form.querySelectorAll("[name=family]")];
    form.hidden = false;
    form.addEventListener("input", filter);
    form.addEventListener("submit", (event) => event.preventDefault());
    form.addEventListener("reset", () => setTimeout(filter));
    filter();

    function filter() {
      const wanted = text.value.toLowerCase().split(",").map((word) => word.trim()).filter(Boolean);
      const families = new Set(boxes.filter((box) => box.checked).map((box) => box.value));
      const open = !wanted.length && !budget?.value && families.size === boxes.length;
      let shown = 0, all = 0;
      for (const row of document.querySelectorAll(".scroll tbody tr")) {
        const words = [...row.querySelectorAll(".word")].map((cell) => cell.textContent.toLowerCase()).join(" ");
        const stays = row.classList.contains("baseline") || (
          (!wanted.length || wanted.some((word) => words.includes(word)))
          && (!budget?.value || !("budget" in row.dataset) || row.dataset.budget === budget.value)
          && (!boxes.length || !("family" in row.dataset) || families.has(row.dataset.family)));
        row.classList.toggle("left-out", !stays);
        all += 1;
        shown += stays;
      }
      const count = open ? "All lines shown" : `${shown} of ${all} lines of all tables shown`;
      document.getElementById("filter-count").textContent = count;
      form.querySelector("[type=reset]").hidden = open;
    }
  }

  for (const button of document.querySelectorAll("button[data-command]")) {
    button.addEventListener("click", async () => {
      const done = await copy(button.dataset.command);
      button.textContent = done ? "copied" : "failed";
      said.textContent = done ? "Command copied" : "The command could not be copied";
      setTimeout(() => { button.textContent = "copy"; }, 1500);
    });
  }

  async function copy(text) {
    try {
      await navigator.clipboard.writeText(text);
      return true;
    } catch {
      const field = document.createElement("textarea");
      field.value = text;
      document.body.append(field);
      field.select();
      const done = document.execCommand("copy");
      field.remove();
      return done;
    }
  }

  // On paper everything is open, and closes again afterwards.
  let opened = [];
  addEventListener("beforeprint", () => {
    opened = [...document.querySelectorAll("details:not([open])")];
    for (const part of opened) part.open = true;
  });
  addEventListener("afterprint", () => { for (const part of opened) part.open = false; });
})();
