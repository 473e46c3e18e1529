// Sphinx's search: the guide comes first, the internals last. All other numbers are Sphinx's own.
var Scorer = {
  score: ([docname, , , , score]) => {
    if (/^(guide\/|index$|reference$)/.test(docname)) return score + 100;
    return /^(internals\/|benchmarks$|changelog$|contributing$)/.test(docname) ? score - 100 : score;
  },
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
};
