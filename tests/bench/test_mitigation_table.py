"""The tables of mitigations, with tiny settings: numbers, resuming, images."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from sinkwise.synthetic.broadcast import Broadcast
from sinkwise.synthetic.damping import Damping
from sinkwise.synthetic.forms import FORMS

BENCH = Path(__file__).parents[2] / "bench"


@pytest.fixture(autouse=True)
def bench(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCH))


@pytest.fixture
def vit():
    import small_vit

    return small_vit


def cells(table):
    """The rows of a Markdown table by their first cell, heading left out."""
    lines = [line.strip("| \n").split(" | ") for line in table.splitlines()]
    return {line[0]: line[1:] for line in lines[2:]}


def test_from_end_to_end(tmp_path, monkeypatch, capsys):
    import mitigation_table
    import small_vit

    monkeypatch.setattr(small_vit, "TEST_IMAGES", 24)
    names = ["none", "headwise gate", "gate + registers", "sink logit", "global pathway"]
    arguments = [str(tmp_path), "--parts", "vit,costs", "--mitigations", ",".join(names)]
    arguments += ["--vit-steps", "2", "--vit-seeds", "1", "--rounds", "1", "--no-large"]
    found = mitigation_table.main(arguments)
    assert list(found) == ["board", "queries", "canvas", "small"]
    assert all(list(cells(table)) == names for table in found.values())
    printed = capsys.readouterr().out
    assert all(table in printed for table in found.values())
    small = cells(found["small"])
    added = {name: float(small[name][0].strip("+%")) for name in names[1:]}
    flops = {name: float(small[name][1].strip("+%")) for name in names[1:]}
    assert 0 < added["sink logit"] < added["headwise gate"] < added["global pathway"]
    assert flops["sink logit"] == 0 < flops["headwise gate"] < flops["gate + registers"]
    queries = cells(found["queries"])
    assert queries["none"][2] == "0.000" and float(queries["sink logit"][2]) > 0.01
    assert queries["none"][3] == "-" and 0.8 < float(queries["headwise gate"][3]) < 0.95
    assert cells(found["board"])["none"][6] == "-", "no registers there"
    assert float(cells(found["board"])["gate + registers"][6]) > 0.05

    def no_training(*args, **kwargs):
        raise AssertionError("trained again")

    monkeypatch.setattr(small_vit, "fit", no_training)
    docs = tmp_path / "docs.md"
    places = "".join(
        f"<!-- {name} -->\n<!-- /{name} -->\n" for name in ("board", "queries", "canvas")
    )
    docs.write_text(f"before\n{places}after\n")
    monkeypatch.setattr(mitigation_table, "DOCS", docs)
    arguments[2] = "vit"
    again = mitigation_table.main([*arguments, "--write"])
    assert again == {name: found[name] for name in again}
    assert all(table in docs.read_text() for table in again.values())
    with pytest.raises(AssertionError, match="trained again"):
        mitigation_table.main([*arguments, "--vit-steps", "3"])


def test_the_synthetic_tables(tmp_path, monkeypatch):
    import mitigation_table

    for kind, form, task in (
        ("nop", "fast", Damping(steps=200)),
        ("nop", "no-null", Damping(common_norm=0.5, null_norm=None, steps=200)),
        ("broadcast", "deep", Broadcast(steps=150)),
    ):
        monkeypatch.setitem(FORMS[kind], form, task)
    arguments = ["--parts", "synthetic", "--synthetic-seeds", "1"]
    arguments += ["--mitigations", "none,sink logit,global pathway"]
    found = mitigation_table.main([str(tmp_path), *arguments])
    rows = [line.strip("| \n").split(" | ") for line in found["nop"].splitlines()[2:]]
    nop = {(row[0], row[1]): row[2:] for row in rows}
    assert len(nop) == 6
    plain, sunk = (nop[name, "without one"] for name in ("none", "sink logit"))
    assert plain[1] == sunk[1] == "-", "nothing is special at position 0"
    assert plain[3] == "-" and float(sunk[3]) > 0.9 > 0.1 > float(sunk[4])
    assert float(plain[0]) > 2 * float(sunk[0])
    assert float(nop["none", "with a null token"][1]) > 0.9
    broadcast = cells(found["broadcast"])
    assert float(broadcast["none"][2]) > 0.9 and broadcast["none"][5] == "-"
    assert 0 < float(broadcast["global pathway"][5]) < 1


def test_the_one_table_picks_from_the_others():
    import mitigation_table

    tables = {}
    for number, (_, table, heading) in enumerate(mitigation_table.SUMMARY):
        rows = tables.setdefault(table, [["mitigation"], ["none"], ["gate"], ["gate"]])
        rows[0].append(heading)
        for row, word in zip(rows[1:], ("plain", "first", "second"), strict=True):
            row.append(f"{word} {number}")
    found = mitigation_table.summary(tables, ["none", "gate"])
    assert found[1] == ("none", *(f"plain {number}" for number in range(10)))
    assert found[2] == ("gate", *(f"first {number}" for number in range(10)))
    tables["nop"].pop(1)
    assert mitigation_table.summary(tables, ["none"])[1][:4] == ("none", "-", "-", "plain 2")


def test_unusable_options_are_named(tmp_path, capsys):
    import mitigation_table

    for given, words in (
        (["--parts", "vit,cost"], "--parts must be from synthetic, vit, costs; got 'cost'"),
        (["--mitigations", "none,gates"], "--mitigations must be from none, elementwise gate"),
        (
            ["--mitigations", "registers,none"],
            "must begin with 'none', the baseline of the others; got 'registers'",
        ),
    ):
        with pytest.raises(SystemExit):
            mitigation_table.main([str(tmp_path), *given])
        assert words in capsys.readouterr().err


def test_the_board(vit):
    recipe = vit.Recipe(task="board", bright_share=0.4)
    found = vit.draw(recipe, 7, torch.Generator().manual_seed(0), train=True)
    pixels, labels = vit.digits()
    for image, targets, silent in zip(*found[:2], found.silent, strict=True):
        assert found.ink.all()
        patches = silent.reshape(6, 6)
        tiles = patches[::2, ::2]
        assert torch.equal(tiles.repeat_interleave(2, 0).repeat_interleave(2, 1), patches)
        answer = torch.zeros(10)
        for row in range(3):
            for column in range(3):
                tile = image[0, 8 * row : 8 * row + 8, 8 * column : 8 * column + 8]
                light = 0.5 if tiles[row, column] else 1.0
                same = (pixels[: vit.TRAIN_DIGITS] * light == tile).all(-1).all(-1).nonzero()
                assert len(same), "an upright digit of the training part"
                answer[labels[same[0]]] += 3 / 9
        answers = targets.reshape(6, 6, 10)
        assert not answers[patches].any()
        torch.testing.assert_close(answers[~patches], answer.expand(int((~patches).sum()), -1))


def test_the_canvas(vit):
    recipe = vit.RECIPES["canvas"]
    found = vit.draw(recipe, 50, torch.Generator().manual_seed(0), train=False)
    pixels, labels = vit.digits()
    held_out = pixels[vit.TRAIN_DIGITS :]
    for image, label, ink in zip(found.pixels, found.targets, found.ink, strict=True):
        tiles = F.unfold(image[None], 8, stride=4)[0].T.reshape(-1, 8, 8)
        whole = tiles[tiles.sum((1, 2)) == image.sum()]
        same = [(held_out == tile).all(-1).all(-1).nonzero() for tile in whole]
        assert label in [labels[vit.TRAIN_DIGITS + one[0]] for one in same if len(one)]
        blank = F.unfold(image[None], 4, stride=4)[0].T.sum(-1) == 0
        assert torch.equal(ink, ~blank) and ink.sum() <= 4
    assert not found.silent.any()
    assert len({tuple(ink.nonzero()[0].tolist()) for ink in found.ink}) > 10, "positions differ"


def test_variants_start_alike_and_differ_in_what_they_are_for(vit):
    recipe = vit.Recipe(task="board", width=16, depth=2)
    pixels = vit.test_images(recipe).pixels[:5]
    built = {name: vit.build(replace(recipe, mitigation=name)) for name in vit.MITIGATIONS}
    plain = built["none"](pixels)
    for name, model in built.items():
        assert torch.equal(
            model.trunk.patch_embed.proj.weight, built["none"].trunk.patch_embed.proj.weight
        )
        assert torch.equal(model(pixels), plain) == (name == "none")
    for block in built["sink logit"].trunk.blocks:
        block.attn.sink_logits.logit.data.fill_(-30.0)
    torch.testing.assert_close(built["sink logit"](pixels), plain)
    for block in built["global pathway"].trunk.blocks:
        block.attn.pathway.v_proj.weight.data.zero_()
    torch.testing.assert_close(built["global pathway"](pixels), plain)
    assert vit.penalty(built["none"].train()) == 0


def test_quality(vit):
    board = vit.Recipe(task="board")
    images = vit.test_images(board)

    class Says(torch.nn.Module):
        def __init__(self, answers):
            super().__init__()
            self.answers = answers

        def forward(self, pixels):
            return self.answers

    assert vit.quality(board, Says(images.targets), images) == 1
    mean = images.targets[~images.silent].mean(0).expand_as(images.targets)
    assert vit.quality(board, Says(mean), images) == pytest.approx(0, abs=1e-6)
    canvas = vit.RECIPES["canvas"]
    images = vit.test_images(canvas)
    right = F.one_hot(images.targets, 10).float()[:, None].repeat(1, 36, 1)
    assert vit.quality(canvas, Says(right), images) == 1
    right[:, :9] = right[:, :9].roll(1, -1)
    assert vit.quality(canvas, Says(right), images) == pytest.approx(0.75)


def test_flops_of_attention_on_a_cpu():
    import mitigation_costs

    q, k, v = (torch.randn(2, 3, 5, 7, requires_grad=True) for _ in range(3))
    layer = torch.nn.Linear(7, 11)

    def step():
        return layer(F.scaled_dot_product_attention(q, k, v)).sum()

    product = 2 * 2 * 3 * 5 * 5 * 7
    linear = 2 * (2 * 3 * 5) * 7 * 11
    # Two products forward, five backward; a linear map one and two.
    assert mitigation_costs.step_flops(layer, step) == 7 * product + 3 * linear


def test_what_patches_receive_from_tokens_that_share_a_sink(vit):
    import vit_evaluation

    recipe = vit.Recipe(task="board", width=16, depth=1, mitigation="registers")
    model = vit.build(recipe).eval()
    block, registers = model.trunk.blocks[0], model.trunk.registers.tokens.data
    registers[:] = registers[0]  # four equal tokens are one sink
    block.attn.qkv.weight.data[:32] *= 30
    evaluation = vit_evaluation.Evaluation(recipe, model)
    assert evaluation.prefix == 5
    numbers = evaluation.numbers
    assert 0 < numbers["dim, prefix"] < 1 and abs(numbers["dim, none"]) < 1e-6
    block.attn.qkv.weight.data[32:] *= 7  # values, of registers and of patches
    assert vit_evaluation.Evaluation(recipe, model).numbers["dim, ratio"] == pytest.approx(
        numbers["dim, ratio"], rel=1e-4
    )
    block.norm1.weight.data.zero_()  # all tokens alike: every value is the usual one
    block.norm1.bias.data.fill_(1.0)
    alike = vit_evaluation.Evaluation(recipe, model).numbers
    assert alike["dim, ratio"] == pytest.approx(1, rel=1e-4)
    assert alike["dim, prefix"] == pytest.approx(5 / 41, rel=1e-4)


def test_counts_and_shares():
    import vit_evaluation

    assert vit_evaluation.counts([["nop", "none"], ["nop", "mixed"]]) == "3/4: 2 nop, 1 mixed"
    assert vit_evaluation.counts([["none", "none"]]) == "0/2"
