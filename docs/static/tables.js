// Labels for tables of three or more columns: on a phone each cell stands alone (site.css).
document.addEventListener("DOMContentLoaded", () => {
  for (const table of document.querySelectorAll("table.docutils")) {
    const heads = [...table.querySelectorAll("thead th")].map((head) => head.textContent.trim());
    if (heads.length < 3) continue;
    for (const row of table.querySelectorAll("tbody tr")) {
      [...row.cells].forEach((cell, column) => {
        if (column > 0 && heads[column] && cell.textContent.trim()) cell.dataset.label = heads[column];
      });
    }
  }
});
