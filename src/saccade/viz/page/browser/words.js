// The words on the page, in English and Chinese.

export const WORDS = {
  en: {
    heads: "Heads", map: "Map", text: "Text", weights: "Strongest weights", colouredBy: "Coloured by", order: "Order",
    inPlace: "by layer", most: "largest first", least: "smallest first", tiles: "Tiles", colours: "colours", maps: "maps",
    findHeads: "Find heads", choose: "choose…", sink: "sinks", previous: "previous token", induction: "induction", broad: "broad",
    like: "like this one", likeness: "likeness", scale: "Scale", log: "logarithmic", linear: "linear", sinksHere: "Sinks",
    shown: "shown", hidden: "hidden", findText: "Find text", whole: "Whole", zoomIn: "Zoom in", zoomOut: "Zoom out",
    save: "Save", language: "中文", theme: "Dark or light", help: "Keys", layer: "layer", head: "head", looksAt: "looks at",
    lookedAtBy: "is looked at by", query: "query", key: "key", weight: "weight", atMost: "at most", ofCell: "all of the cell",
    notKept: "not kept in this recording", howToKeep: 'sc.record(model, keep="qk") keeps the maps',
    pointAt: "Point at a token, or choose one: blue is what it looks at, orange what looks at it.",
    ofQueries: "Text of the queries", ofKeys: "Text of the keys", earlier: "Earlier", later: "Later", of: "of", none: "none",
    uniform: "uniform", difference: "difference", compare: "Recording", live: "Running: the page reloads every",
    seconds: "seconds", pause: "Pause", goOn: "Resume", hiddenPair: "hidden by the mask", close: "Close",
    mapSays: "Map of a head: rows are queries, columns are keys. Arrow keys move, + and - zoom, 0 shows all.",
    unlike: "The two maps have different cells, so there is no difference to show.", tokens: "tokens", special: "special token",
    onlyCoarse: "This head was kept as a small map only.", sinksAre: "keys that get at least 5% of a layer's attention",
    keys: [
      ["← → ↑ ↓", "next head or layer; in the map, move"], ["+ − 0", "zoom the map, show all of it"], [", .", "previous, next token"],
      ["/", "find text"], ["l", "logarithmic or linear"], ["s", "hide or show sinks"], ["m", "tiles as maps or colours"],
      ["c", "the other recording, the difference"], ["t", "dark or light"], ["Esc", "clear the selection"], ["?", "these keys"],
    ],
    measures: {},
    meanings: {},
  },
  zh: {
    heads: "注意力头", map: "注意力图", text: "文本", weights: "最大的权重", colouredBy: "按什么着色", order: "顺序",
    inPlace: "按层", most: "从大到小", least: "从小到大", tiles: "格子", colours: "颜色", maps: "缩略图",
    findHeads: "查找头", choose: "请选择…", sink: "汇聚头", previous: "看前一个词元", induction: "归纳头", broad: "分散的头",
    like: "与当前头相似", likeness: "相似度", scale: "刻度", log: "对数", linear: "线性", sinksHere: "汇聚点",
    shown: "显示", hidden: "隐藏", findText: "查找文本", whole: "全图", zoomIn: "放大", zoomOut: "缩小",
    save: "保存", language: "English", theme: "深色或浅色", help: "按键", layer: "层", head: "头", looksAt: "看向",
    lookedAtBy: "被谁看", query: "查询", key: "键", weight: "权重", atMost: "至多", ofCell: "整个格子",
    notKept: "这次记录没有保留", howToKeep: 'sc.record(model, keep="qk") 会保留图',
    pointAt: "指向或选中一个词元：蓝色是它看的，橙色是看它的。",
    ofQueries: "查询的文本", ofKeys: "键的文本", earlier: "往前", later: "往后", of: "/", none: "无",
    uniform: "均匀注意力", difference: "差", compare: "记录", live: "运行中：页面自动重新读取，间隔",
    seconds: "秒", pause: "停止读取", goOn: "继续读取", hiddenPair: "被掩码遮住", close: "关闭",
    mapSays: "一个头的注意力图：行是查询，列是键。方向键移动，+ 和 - 缩放，0 显示全图。",
    unlike: "两张图的格子不同，没有差可看。", tokens: "个词元", special: "特殊词元",
    onlyCoarse: "这个头只保留了小图。", sinksAre: "至少得到一层注意力 5% 的键",
    keys: [
      ["← → ↑ ↓", "换头或换层；在图中则移动"], ["+ − 0", "缩放、显示全图"], [", .", "前一个、后一个词元"],
      ["/", "查找文本"], ["l", "对数或线性"], ["s", "隐藏或显示汇聚点"], ["m", "格子用缩略图或颜色"],
      ["c", "另一次记录、差"], ["t", "深色或浅色"], ["Esc", "取消选择"], ["?", "这些按键"],
    ],
    measures: {
      entropy: "熵", relative_entropy: "相对熵", effective_tokens: "有效词元数", largest_weight: "最大权重",
      first_mass: "给首个词元的份额", first_4_mass: "给前四个词元的份额", self_mass: "给自己的份额",
      previous_mass: "给前一个词元的份额", local_mass: "给附近词元的份额", distance: "平均距离", most_received: "得到最多的键的份额",
      position_information: "位置互信息", frobenius_norm: "弗罗贝尼乌斯范数", largest_logit: "最大的分数",
      logit_variance: "分数的方差", induction_mass: "归纳份额", given_mass: "行的总和", squared_norm: "平方和",
    },
    meanings: {
      entropy: "奈特：一个查询分散到多少个键上", relative_entropy: "除以可见键数的对数；1 是均匀", effective_tokens: "个键：熵的指数",
      largest_weight: "份额：一个查询最强的键", first_mass: "份额：给第一个词元", first_4_mass: "份额：给前四个词元", self_mass: "份额：给自己的词元",
      previous_mass: "份额：给前一个词元", local_mass: "份额：给前后 16 个词元以内", distance: "个词元：看多远，取平均", most_received: "占全部的份额：得到最多的键",
      position_information: "奈特：查询的位置说明了多少它看哪里", frobenius_norm: "所有权重平方和的平方根", largest_logit: "奈特：所有分数中最大的",
      logit_variance: "奈特平方：一个查询的各个分数", induction_mass: "份额：给同一词元上次出现之后的那个词元", given_mass: "份额：汇聚参数留下的", squared_norm: "一行权重的平方和",
    },
  },
};

export function languageOf(asked, given) {
  if (asked in WORDS) return asked;
  return given in WORDS ? given : navigator.language.startsWith("zh") ? "zh" : "en";
}

/** Return a word of the page in a language. */
export function say(language, name) {
  return WORDS[language][name];
}

/** Return the name of a measure. */
export function nameOf(language, measure) {
  return WORDS[language].measures[measure] ?? (measure === "likeness" ? say(language, measure) : measure.replaceAll("_", " "));
}

/** Return the meaning of a measure, with its unit. @param {{name: string, unit: string, meaning: string}} measure */
export function meaningOf(language, { name, unit, meaning }) {
  return WORDS[language].meanings[name] ?? [unit, meaning].filter(Boolean).join(": ");
}

/** Format a number with three significant digits. */
export function number(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  const size = Math.abs(value);
  if (size !== 0 && (size < 0.001 || size >= 100000)) return value.toExponential(1);
  return String(Number(value.toPrecision(3)));
}
