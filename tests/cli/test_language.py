"""``saccade --lang zh``, and the language of the system."""

import json
import re

import pytest
import torch

import saccade as sc
from saccade import auditing, compare, masks, mechanisms
from saccade.cli import loading, main
from saccade.learning import runs
from saccade.support.language import in_language, translated


@pytest.mark.ci
@pytest.mark.parametrize("arguments", [["--lang", "zh"], ["--lang=zh"]])
@pytest.mark.parametrize("is_first", [True, False])
def test_the_language_stands_before_or_after_the_command(run, arguments, is_first):
    command = ["cost", "causal", "--tokens", "64"]
    result = run(*arguments, *command) if is_first else run(*command, *arguments)
    assert result.exit_code == 0, result.output
    assert result.output.startswith("Causal() 的开销")


def test_text_after_two_dashes_is_no_option(run):
    result = run("compare", "--layer", "99", "--", "--lang", "zh")
    assert "--layer must be from 0 to 5; got 99" in result.output


@pytest.mark.parametrize("arguments, variables", [(["--lang", "zh"], {}), ([], {"LANG": "zh_CN.UTF-8"})])
def test_the_command_line_speaks_chinese(run, encoder, monkeypatch, arguments, variables):
    for name in ("LC_ALL", "LC_MESSAGES", "LANG"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    result = run(*arguments, "look", "A lizard is not a snake.")
    assert result.exit_code == 0, result.output
    assert "层第" in result.output.splitlines()[0]
    for words in ("关注", "汇点", "含义", "已写入", "得到各词注意力的"):
        assert words in result.output
    assert not any(words in result.output for words in ("looks at", "runner-up", "wrote", "what it is"))
    assert translated("key") == "key"  # only while the command runs


def test_help_is_chinese(run):
    result = run("--lang", "zh", "look", "--help")
    assert result.exit_code == 0
    assert "图中不画 [CLS]、[SEP] 等特殊词元" in " ".join(result.output.split())
    assert "显示已训练的模型" in run("--lang", "zh", "--help").output
    assert "Show what a trained model attends to" in run("--lang", "en", "look", "--help").output


@pytest.mark.parametrize("command", [(), ("look",), ("compare",), ("cost",), ("judge",)])
def test_headings_and_remarks_of_help_are_chinese(run, command):
    english = r"Usage|Arguments|Options|Commands|Show this|\[default|required\]|if most"
    assert re.findall(english, run("--lang", "zh", *command, "--help").output) == []
    assert len(re.findall(english, run("--lang", "en", *command, "--help").output)) >= 3


def test_help_of_the_whole_command_is_in_the_language_of_the_system(monkeypatch, capsys):
    for name in ("LC_ALL", "LC_MESSAGES"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("LANG", "zh_CN.UTF-8")
    for arguments, words in (
        (["--help"], "显示已训练的模型"),
        (["--lang", "en", "--help"], "Show what a trained model"),
    ):
        monkeypatch.setattr("sys.argv", ["saccade", *arguments])
        with pytest.raises(SystemExit, match=r"^0$"):
            main()
        assert words in capsys.readouterr().out


def test_another_language_is_refused(run):
    result = run("--lang", "fr", "look", "text")
    assert result.exit_code == 2
    assert result.output.strip() == "saccade: --lang must be en or zh; got fr."


def chinese(run, *arguments):
    """The lines that a command prints in Chinese."""
    result = run("--lang", "zh", *arguments)
    assert result.exit_code in (0, 1), result.output
    return result.output.splitlines()


def english(line):
    """The English words of a line."""
    return re.findall(r"[A-Za-z]{2,}", line)


def test_a_cost_is_printed_in_chinese(run):
    first, head, *rows, last = chinese(run, "cost", "causal", "--tokens", "64", "--memory", "2")
    assert first == "Causal() 的开销：64 个词元，批大小 1，bfloat16，32 个头，每头 128 个通道"
    assert not english(head)
    assert [row.split()[0] for row in rows[:3]] == ["前向", "训练", "解码"]
    assert last == "在 2 GiB 内存中：运行一次放得下，训练一步放得下"


def test_a_plan_is_printed_in_chinese(run):
    lines = chinese(run, "cost", "causal", "--tokens", "4096", "--ranks", "4", "--heads", "6")
    names = {"Causal", "MiB", "ms", "fetch", "gather", "ulysses", "contiguous", "zigzag", "striped", "balanced"}
    assert {word for line in lines for word in english(line)} <= names
    assert "未选 ulysses：4 个设备不能整除 6 个头和 6 个键头" in lines


def test_a_comparison_is_printed_in_chinese(run):
    options = ("--features", "8", "--landmarks", "4", "--mask", "sliding(3)")
    model, first, head, exact, *lines = chinese(run, "compare", *options, "A lizard is not a snake.")
    assert model == "all-MiniLM-L6-v2 第 0 层，9 个词元"
    assert not english(first + head)
    assert exact.startswith("精确")
    assert "Performer(8)：偏差过大，在这些张量上不能代替精确注意力" in lines


def test_what_a_mechanism_refuses_is_printed_in_chinese():
    tensors = torch.rand(3, 1, 1, 4, 2).unbind()
    with in_language("zh"):
        line = str(compare(*tensors, [mechanisms.Performer(4)], mask=masks.sliding_window(2))).splitlines()[-1]
    assert line.startswith("Performer：不支持：Window 不是 Causal、Padding 或 Documents：只保存")


def test_an_audit_is_printed_in_chinese(run, monkeypatch):
    monkeypatch.setitem(loading.NAMED, "mine", sc.models.small_decoder)
    options = ("--rule", "causal & window(3, 0)", "--length", "16", "--tests", "2", "--padded", "--claim", "window")
    lines = chinese(run, "audit", "mine", *options, "--script")
    rule, measured, _, head, *rows = lines[1:]
    assert [line.split()[0] for line in (rule, measured, *rows[:2])] == ["规则", "实测", "可达", "可见"]
    assert head.split() == ["论断", "结论", "最大", "容许", "第一处", "模块", "运行次数"]
    layer = next(row for row in rows if row.startswith("逐层"))
    assert layer.split()[1] == "不成立"
    assert re.search(r"输出 \d+ 依赖词元 \d+ +stack\.layers\.0\.attention", layer)
    assert any(re.match(r"  窗口：stack.layers.0.attention 和另外 3 个模块：查询之前 \d+ 个键", row) for row in rows)
    assert any(row.startswith("检验了 2 组输出；合起来覆盖了") for row in rows)


def test_the_budget_of_an_audit_is_printed_in_chinese(run):
    lines = chinese(run, "audit", "--budget", "--tests", "4", "--length", "99")
    assert {word for line in lines for word in english(line)} == {"tests"}


def test_claims_are_printed_in_chinese(run):
    only = ("--only", "softmax-jacobian-as-printed", "--only", "softmax-is-half-lipschitz")
    heading, verdict, statement, *lines, counts, measured, last = chinese(run, "verify", *only)
    assert heading == "SOFTMAX"
    assert verdict == "  ok  softmax-jacobian-as-printed  被推翻"
    assert statement == "      权重 ij 对得分 kl 的导数等于 A_ij 乘以 δ_ik 与 A_kj 之差。"
    assert lines[0].startswith("      实际上：正确的公式是")
    assert any(re.search(r"：实测 -0\.25，论断说是 0\.25（相差超过 0\.1 即被推翻）$", line) for line in lines)
    assert counts == "2 条论断：1 条成立，1 条被推翻。"
    assert not english(measured)
    assert last == "所有结论都得到证实。"


def test_claims_are_listed_in_chinese(run):
    heading, *lines = chinese(run, "verify", "--list", "--only", "scaling")
    assert heading == "缩放"
    assert lines[1].startswith("  成立        variance-of-dot-products：q·k 的方差")


KERNEL = """
def plain(query, key, value, mask):
    scores = (query @ key.mT / query.shape[-1] ** 0.5).masked_fill(~mask, -1e9)
    return scores.softmax(-1) @ value
"""
FEW = tuple(option for case in ("causal", "none", "window-past", "nothing") for option in ("--case", case))
LAWS = ("oracle", "empty_rows", "isolation", "lse", "gradients_of_parameters", "unusual_values", "offered")


def test_a_judgement_is_printed_in_chinese(run, tmp_path):
    (tmp_path / "kernel.py").write_text(KERNEL)
    options = ("--claim", "groups=false", "--dtype", "float32", "--seed", "0", "--minutes", "9", "--scripts", "scripts")
    options += tuple(option for law in LAWS for option in ("--law", law)) + FEW
    first, note, _, head, *lines = chinese(run, "judge", f"{tmp_path}/kernel.py::plain", *options)
    assert first.startswith("plain，设备 cpu，种子 0，")
    assert note.startswith("不接受 float16（已代为声明：RuntimeError: value cannot be converted")
    assert "；如果内核支持，请写 --claim 'dtypes=" in note
    assert head.split() == ["定律", "结论", "成立", "不成立", "不支持"]
    rows = {line.split()[0]: line for line in lines if line.split()[:1] and line.split()[0] in LAWS}
    assert rows["lse"].split()[1] == "未检验"
    assert rows["lse"].endswith("内核不支持：不返回 lse")
    assert rows["gradients_of_parameters"].endswith("没有适用的用例：它的选项都没有参数")
    assert rows["isolation"].split()[1] == "不成立"
    assert "含 NaN 时，" in rows["isolation"]
    names = {"NaN", "inf", "nan", "lse", "query", "key", "value", "float", "scripts", "py"}
    names |= {"claim", "non_finite", "false"}
    texts = [re.sub(r"\b[A-Z]\w+\([^，]*", "", line) for line in lines]  # without masks
    assert {word for line in texts for word in re.findall(r"[A-Za-z_]{2,}", line)} <= names | set(LAWS)


def test_a_kernel_that_returns_zeros_is_judged_in_chinese(run, tmp_path):
    text = "import torch\n\ndef zeros(query, key, value, mask):\n"
    (tmp_path / "kernel.py").write_text(text + "    return torch.zeros(*query.shape[:3], value.shape[3])\n")
    laws = ("oracle", "gradients_of_inputs", "dtypes", "sensitivity", "isolation", "honesty", "order_of_calls", "sizes")
    options = tuple(option for law in laws for option in ("--law", law))
    options += ("--claim", 'dtypes=["float32","float64"]', "--claim", 'masks=["causal","window"]')
    options += ("--claim", "gradients=true", *FEW)
    lines = chinese(run, "judge", f"{tmp_path}/kernel.py::zeros", "--seed", "0", "--minutes", "9", *options)
    rows = {line.split()[0]: line.split(None, 5)[-1] for line in lines if line.split()[:1] and line.split()[0] in laws}
    assert rows["gradients_of_inputs"] == "输出对输入没有梯度"
    assert rows["honesty"].endswith("含 NaN 时，能看到它的行是有限的")
    names = {"NaN", "query", "key", "value", "zeros", "cpu", "torch", "float32", "float64", "Causal", "Window"}
    assert {word for why in rows.values() for word in re.findall(r"[A-Za-z_]\w+", why)} <= names
    assert "之后完整的输入的输出" in rows["order_of_calls"]


def test_trainings_are_printed_in_chinese(run, monkeypatch):
    def at_once(left, settings, workers):
        return [(one, runs.Outcome(0.25 if one.seed else 1.0, settings.steps, 30.0, 10)) for one in left]

    monkeypatch.setattr(runs, "_train_all", at_once)
    options = ("--only", "MQAR", "--only", "LSTM", "--only", "full", "--seeds", "2")
    lines = chinese(run, "compare", "--train", *options)
    assert {word for line in lines for word in english(line)} == {"MQAR", "LSTM", "full"}
    assert any(line.split()[:2] == ["LSTM", "0.62（0.25"] for line in lines)
    assert any(line.strip().startswith("最常见的答案") for line in lines)
    assert lines[-1].startswith("新文本上答对的比例：2 个种子的均值（最低到最高）")


def test_a_training_set_up_is_audited_in_chinese():
    model, texts = sc.models.small_decoder(), [torch.arange(3, 12), torch.arange(5, 22)]
    with in_language("zh"):
        lines = str(
            auditing.audit_setup(model, lambda rows: torch.stack([row[:9] for row in rows]), texts, claims=())
        ).splitlines()
    assert any("批次中没有原样的第 1 段文本（共 2 段）" in line for line in lines)


def test_a_trace_of_generation_is_printed_in_chinese(run):
    result = run("--lang", "zh", "generate", "Return a new list", "--max-new-tokens", "2", "--trace")
    head, prefill, decode = (line.split() for line in result.stderr.splitlines()[:3])
    assert head == ["步", "阶段", "词元", "读取", "K,V", "写入", "选中"]
    assert (prefill[1], decode[1]) == ("预填充", "解码")


def test_json_stays_english(run, monkeypatch):
    monkeypatch.setitem(loading.NAMED, "mine", sc.models.small_decoder)
    options = ("--length", "12", "--tests", "1", "--claim", "sinks", "--json")
    first, second = (run("--lang", language, "audit", "mine", *options).output for language in ("en", "zh"))
    assert json.loads(first) == json.loads(second)
    assert "no sink parameter was found" in first
