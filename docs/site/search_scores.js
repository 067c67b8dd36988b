// Decisions, and pages that name everything once, come after pages that explain: see the scores in searchtools.js.
var Scorer = {
  score: (item) => {
    const [docname, title, anchor, descr, score, filename, kind] = item;
    if (kind === "index") item[2] = ""; // an entry leads to its page, whose text is shown below the title
    if (docname.startsWith("decisions/")) return score - 100;
    if (["bibliography", "concordance", "theory-documents"].includes(docname)) return score - 30;
    return score;
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
