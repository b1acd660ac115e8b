"""The page of a run: read back by a parser, as a browser would take it apart."""

import base64
import hashlib
import json
import re
from html.parser import HTMLParser

import pytest

from rlpost.report import curves, samples, write_page
from rlpost.report.page import headline
from tests.report.example import CHOICES, CLAIMS, lines, write, write_run

EVIL = '</script><script>alert(1)</script><img src=x onerror="alert(1)">&amp;<!--'


class Page(HTMLParser):
    """Elements with their attributes, the text to be seen, and the data."""

    def __init__(self, path):
        super().__init__()
        self.elements, self.text, self.inside = [], "", []
        self.raw = {"script": [], "style": []}
        self.feed(path.read_text("utf-8"))
        self.data = json.loads(self.raw["script"][0])

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        self.inside.append(tag)

    def handle_endtag(self, tag):
        while self.inside and self.inside.pop() != tag:
            pass

    def handle_data(self, data):
        tag = self.inside[-1] if self.inside else ""
        if tag in self.raw:
            self.raw[tag].append(data)
        else:
            self.text += data

    def count(self, tag):
        return sum(name == tag for name, _ in self.elements)


def series(page, name):
    (found,) = [
        s for p in page.data["panels"] for s in p["series"] if s["name"] == name
    ]
    return found


def test_page_shows_the_run(tmp_path):
    run = write_run(tmp_path / "grpo")
    path = write_page(run)
    assert path == run / "report.html"
    page = Page(path)
    assert "grpo" in page.text
    assert CHOICES["objective"] in page.text
    assert "24 of 24" in page.text
    assert "reward failure" in page.text
    for claim in CLAIMS:
        assert claim["claim"] in page.text
        assert claim["verdict"] in page.text
    assert "model.lora.rank" in page.text  # the config, flattened
    written = [json.loads(x) for x in (run / "metrics.jsonl").read_text().splitlines()]
    entropy = [r["entropy"] for r in written if r["kind"] == "train"]
    assert series(page, "entropy")["y"] == entropy
    assert series(page, "entropy")["x"] == list(range(1, 25))
    # pass@1 was measured at 7 steps, and its baselines are lines beside it.
    assert series(page, "eval/pass@1")["x"] == [0, 4, 8, 12, 16, 20, 24]
    guides = page.data["panels"][0]["guides"]
    assert {g["name"]: g["y"] for g in guides} == {"constant": 0.11, "instructed": 0.17}
    # Step 17's loss was nan: a gap, and said.
    assert series(page, "loss")["y"][16] is None
    assert "loss was not finite at step 17" in page.text
    sample = page.data["samples"][0]
    first = json.loads((run / "samples.jsonl").read_text().splitlines()[0])
    assert "".join(sample["tokens"]["text"]) == first["response"]
    assert page.data["prompts"][sample["prompt"]] == first["prompt"]
    assert sample["tokens"]["mask"] == [t["mask"] for t in first["tokens"]]
    assert sample["tokens"]["logp"][0] == pytest.approx(
        first["tokens"][0]["logp"], rel=1e-3
    )


def test_page_asks_nothing_of_the_network(tmp_path):
    page = Page(write_page(write_run(tmp_path / "run")))
    for _, attributes in page.elements:
        assert not {"src", "action", "data-src"} & set(attributes)
        assert attributes.get("href", "#").startswith("#")
    assert "url(" not in page.raw["style"][0]
    assert not re.search(
        r"fetch|import\(|XMLHttp|eval\(|innerHTML", page.raw["script"][1]
    )
    # And its policy lets only this very script and style run.
    (policy,) = [a["content"] for t, a in page.elements if "http-equiv" in a]
    assert policy.startswith("default-src 'none'")
    for text in (page.raw["script"][1], page.raw["style"][0]):
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"'sha256-{digest}'" in policy


def test_markup_in_a_run_is_text(tmp_path):
    clean = Page(write_page(write_run(tmp_path / "clean", steps=2)))
    run = write_run(tmp_path / "run", steps=2)
    write(run / "config.json", {EVIL: {EVIL: EVIL}, "n": 1})
    write(run / "choices.json", {"objective": EVIL, "commit": EVIL})
    write(run / "claims.json", [dict.fromkeys(CLAIMS[0], EVIL)])
    lines(run / "errors.jsonl", [{"step": EVIL, "kind": EVIL, "message": EVIL}])
    lines(
        run / "metrics.jsonl",
        [
            {"step": 1, "kind": "train", "reward/" + EVIL: 1, EVIL: 2},
            {"step": 1, "kind": "eval", "eval/" + EVIL: 1, "eval/baseline_" + EVIL: 0},
        ],
    )
    token = {"text": EVIL, "id": EVIL, "logp": -1, "mask": True, "advantage": 1}
    sample = dict.fromkeys(("kind", "prompt", "response", "finish", "answer"), EVIL)
    lines(run / "samples.jsonl", [{**sample, "step": 1, "tokens": [token]}])
    page = Page(write_page(run))
    assert page.count("script") == clean.count("script") == 2
    assert page.count("img") == 0
    assert all(not k.startswith("on") for _, a in page.elements for k in a)
    assert EVIL in page.text
    assert page.data["samples"][0]["tokens"]["text"] == [EVIL]
    assert page.data["prompts"] == [EVIL]
    assert page.data["panels"][0]["series"][0]["name"] == "eval/" + EVIL


def test_half_written_lines_cost_only_themselves(tmp_path):
    run = write_run(tmp_path / "run", steps=6)
    whole = Page(write_page(run))
    for name in ("metrics.jsonl", "samples.jsonl", "errors.jsonl"):
        with open(run / name, "ab") as file:
            file.write(b'{"step": 7, "kind": "train", "entropy": 0.5, "t\xc3')
    page = Page(write_page(run))
    assert page.data == whole.data
    assert "1 line of metrics.jsonl could not be read" in page.text
    assert "cut off" in page.text
    # Resumed: the next record follows the half one on its line; the rest is whole.
    with open(run / "metrics.jsonl", "a") as file:
        file.write('{"step": 7, "entropy": 9}\n{"step": 7, "entropy": 0.25}\n')
    page = Page(write_page(run))
    assert series(page, "entropy")["x"][-1] == 7
    assert series(page, "entropy")["y"][-1] == 0.25


def test_a_repeated_step_counts_once(tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    records = [{"step": s, "kind": "train", "loss": v} for s, v in ((1, 5), (2, 6))]
    lines(run / "metrics.jsonl", [*records, {"step": 2, "kind": "train", "loss": 7}])
    found = series(Page(write_page(run)), "loss")
    assert (found["x"], found["y"]) == ([1, 2], [5, 7])


@pytest.mark.parametrize(
    "name", ["config.json", "choices.json", "metrics.jsonl", "samples.jsonl"]
)
def test_a_missing_file_is_said(tmp_path, name):
    run = write_run(tmp_path / "run", steps=2)
    (run / name).unlink()
    assert f"There is no {name}" in Page(write_page(run)).text


def test_an_empty_folder_gives_a_page_and_none_gives_an_error(tmp_path):
    (tmp_path / "run").mkdir()
    page = Page(write_page(tmp_path / "run", tmp_path / "elsewhere.html"))
    assert "nothing was measured" in page.text
    assert "No result yet" in page.text
    assert page.data == {"panels": [], "prompts": [], "samples": []}
    assert list((tmp_path / "run").iterdir()) == []
    with pytest.raises(FileNotFoundError, match="give the folder of a run"):
        write_page(tmp_path / "absent")


def test_broken_json_is_said(tmp_path):
    run = write_run(tmp_path / "run", steps=2)
    (run / "config.json").write_text('{"steps": ')
    (run / "claims.json").write_text('{"claim": "not a list"}')
    text = Page(write_page(run)).text
    assert "config.json could not be read" in text
    assert "claims.json holds no list" in text


def test_numbers_that_are_none(tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    (run / "metrics.jsonl").write_text(
        '{"step": 1, "kind": "train", "loss": NaN, "mfu": null}\n'
        '{"step": 2, "kind": "train", "loss": "nan", "mfu": "text"}\n'
        '{"step": 3, "kind": "train", "loss": 0.5, "kl": -Infinity}\n'
        '{"step": 4, "kind": "train", "loss": Infinity}\n'
        '{"step": null, "loss": 1}\n[1, 2]\n"text"\n'
    )
    page = Page(write_page(run))  # whose data is JSON: NaN is not
    assert series(page, "loss")["y"] == [None, None, 0.5, None]
    assert [p["title"] for p in page.data["panels"]] == ["Loss"]
    assert "loss was not finite at 3 steps: 1, 2, 4." in page.text
    assert "kl was not finite at step 3." in page.text
    assert "2 lines of metrics.jsonl could not be read" in page.text


def test_long_runs_give_bounded_pages(tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    names = [f"group{i}/x" for i in range(12)]
    lines(
        run / "metrics.jsonl",
        [
            {
                "step": s,
                "kind": "train",
                "loss": float(s == 5000),
                **dict.fromkeys(names, s),
            }
            for s in range(10_000)
        ],
    )
    token = {"text": " word", "id": 5, "logp": -1.5, "behavior_logp": -1.25}
    long = {"prompt": "p" * 100_000, "tokens": [token] * 5_000}
    lines(
        run / "samples.jsonl",
        [{"step": s, "group": 0, "response": "", **long} for s in range(60)],
    )
    path = write_page(run)
    page = Page(path)
    assert path.stat().st_size < 8e6
    found = series(page, "loss")
    assert len(found["x"]) <= curves.POINTS
    assert found["y"][found["x"].index(5000)] == 1.0  # the one spike is not lost
    assert (found["x"][0], found["x"][-1]) == (0, 9999)
    shown = [s["step"] for s in page.data["samples"]]
    assert {0, 59} <= set(shown)
    assert len(shown) < 60
    assert f"{len(shown)} of 60 samples are shown" in page.text
    assert len(page.data["samples"][0]["tokens"]["text"]) == samples.TOKENS
    assert page.data["samples"][0]["count"] == 5_000
    assert max(map(len, page.data["prompts"])) < samples.CHARACTERS + 50


def test_running_mean_and_thinning_by_hand():
    # 100 values: 2 neighbours each way, fewer at the ends; None does not count.
    y = [float(i) for i in range(100)]
    y[10] = None
    means = curves.running_mean(y)
    assert means[0] == 1.0  # of 0, 1, 2
    assert means[50] == 50.0
    assert means[10] is None
    assert means[9] == pytest.approx((7 + 8 + 9 + 11) / 4)
    # Six of 11 with a peak at 4, a dip at 7: both ends, two stretches' extremes.
    assert curves.thin([5, 4, 5, 5, 9, 6, 5, 1, 5, 5, 5], 6) == [0, 1, 4, 5, 7, 10]


def test_small_series_get_a_panel_of_their_own():
    record = {"step": 1, "kl": 0.5, "kl/teacher": 0.1, "kl_behavior": 1e-4}
    made = curves.panels({"train": [record]}, [])
    labels = [[s["label"] for s in panel["series"]] for panel in made]
    assert labels == [["kl", "teacher"], ["kl behavior"]]


def test_times_by_phase_share_their_steps():
    # They are stacked: thinned one by one, they would not stand on each other.
    records = [
        {"step": s, "time/a": s % 7, "time/b": (s * s) % 11, "time/step": 20.0}
        for s in range(5000)
    ]
    assessed = {"step": 9, "time/a": 3.0}
    panel, *others = curves.panels({"train": records, "eval": [assessed]}, [])
    assert panel["bands"]
    assert [s["name"] for s in panel["series"]] == ["time/a", "time/b"]
    assert [s["name"] for p in others for s in p["series"]] == [
        "time/step",  # which holds the other two
        "eval: time/a",  # of other steps
    ]
    assert len({tuple(s["x"]) for s in panel["series"]}) == 1
    assert len(panel["series"][0]["x"]) <= curves.POINTS


def test_headline_by_hand():
    def at(step, value):
        return {"step": step, "eval/pass@1": value, "eval/baseline_constant": 0.1}

    line = headline({"eval": [at(0, 0.02), at(12, float("nan")), at(24, 0.7)]})
    assert line == {
        "name": "pass@1",
        "before": 0.02,
        "after": 0.7,
        "first": 0,
        "last": 24,
        "baselines": {"constant": 0.1},
    }
    rewarded = headline({"train": [{"step": 3, "reward/mean": 0.5}]})
    assert (rewarded["name"], rewarded["after"]) == ("mean training reward", 0.5)
    assert headline({}) is None
