"""Images of rows: every form they come in, every way in which they can be wrong, and the prompts they make longer."""

from __future__ import annotations

import base64
import dataclasses
from pathlib import Path
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.unit.models import tiny_vision as tiny
from verl_like.config import DataConfig, ModelConfig
from verl_like.data.dataset import PromptDataset
from verl_like.data.preprocess import geometry3k
from verl_like.models.images import MediaError, decoded, header
from verl_like.models.loading import load_hf_config
from verl_like.models.vision import VisionProcessor, processor_of
from verl_like.rewards.graders import compute_score

PICTURE = tiny.picture(0, 56, 84)


def handle(folder: Path, cell: Any, **changes: Any) -> Any:
    found = tiny.write_images(folder / "rows.parquet", [[cell]])[0][0]
    return dataclasses.replace(found, **changes)


@pytest.mark.parametrize("form", ["bytes", "plain bytes", "path", "relative", "url", "data", "nested"])
def test_every_form_of_an_image(tmp_path: Path, form: str) -> None:
    (tmp_path / "a.png").write_bytes(PICTURE)
    with fsspec.open("memory://pictures/a.png", "wb") as file:
        file.write(PICTURE)  # pyright: ignore[reportAttributeAccessIssue]
    cell = {
        "bytes": {"bytes": PICTURE, "path": None},
        "plain bytes": PICTURE,
        "path": {"bytes": None, "path": str(tmp_path / "a.png")},
        "relative": "a.png",
        "url": "memory://pictures/a.png",
        "data": f"data:image/png;base64,{base64.b64encode(PICTURE).decode()}",
        "nested": {"type": "image", "image_url": {"url": "a.png"}},
    }[form]
    found = handle(tmp_path, cell)
    assert header(found, 1) == (56, 84)
    assert decoded(found).size == (56, 84) and decoded(found).mode == "RGB"


def test_cells_of_all_row_groups_are_found(tmp_path: Path) -> None:
    cells = [[{"bytes": tiny.picture(i, 28 + i, 28)} for i in range(r, r + 2)] for r in range(5)]
    handles = tiny.write_images(tmp_path / "rows.parquet", cells, group=2)
    assert [[header(h, 1)[0] for h in row] for row in handles] == [[28 + r, 29 + r] for r in range(5)]


@pytest.mark.parametrize(
    ("cell", "message"),
    [
        (
            {"bytes": b"", "path": "no.png"},
            r"row 0: image 0 of column .images.: .no.png. cannot be read: .*No such",
        ),
        ({"bytes": b"not an image"}, r"row 0: image 0 of column 'images' is no image that PIL can open \(12 bytes\)"),
        ({"bytes": PICTURE[:400]}, r"row 0: image 0 of column 'images' cannot be decoded: .*truncated"),
        ({"bytes": None, "path": None}, r"holds no image: expected bytes, a path, a URL, or a dictionary with one of"),
        ("nosuchscheme://a.png", r"'nosuchscheme://a.png' cannot be read"),
        ("data:image/png;base64,??", r"cannot be read"),
        ({"bytes": tiny.picture(0, 1100, 1000)}, r"1100 x 1000 pixels, more than data.max_image_megapixels=1: make it"),
    ],
)
def test_a_wrong_image_is_named(tmp_path: Path, cell: Any, message: str) -> None:
    found = handle(tmp_path, cell)
    with pytest.raises(MediaError, match=message):
        header(found, 1)
        decoded(found)


def test_a_file_that_is_gone(tmp_path: Path) -> None:
    found = handle(tmp_path, PICTURE, path=str(tmp_path / "gone.parquet"))
    with pytest.raises(MediaError, match=r"gone\.parquet, row 0: image 0 of column 'images' cannot be read"):
        header(found, 1)
    found = handle(tmp_path, PICTURE, row=9)
    with pytest.raises(MediaError, match=r"row 9: .* the file has fewer rows"):
        header(found, 1)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    tiny.save(folder)
    return folder


def vision(model: Path, **settings: Any) -> VisionProcessor:
    config = ModelConfig(path=str(model), **settings)
    found = processor_of(config, load_hf_config(config))
    assert found is not None
    return found


def dataset(model: Path, files: Path, **settings: Any) -> PromptDataset:
    limit = settings.pop("limit_images", None)
    data = DataConfig(**{"max_prompt_length": 64, **settings})
    return PromptDataset(data, str(files), tiny.tokenizer(), split="train", vision=vision(model), limit_images=limit)


def write_rows(path: Path, *rows: tuple[str, list[Any]], column: str = "images") -> Path:
    prompts = [[{"role": "user", "content": text}] for text, _ in rows]
    answers = [{"style": "rule", "ground_truth": "1"}] * len(rows)
    columns = {"prompt": prompts, column: [cells for _, cells in rows], "reward_model": answers}
    pq.write_table(pa.table(columns), path)
    return path


def test_prompts_grow_by_the_tokens_of_their_images(model: Path, tmp_path: Path) -> None:
    """As transformers' processor writes them: one token for each 2 x 2 patches."""
    wide = {"bytes": tiny.picture(1, 112, 56)}
    rows = ("w1<image>w2", [{"bytes": PICTURE}]), ("<image>w3<image>", [wide, {"bytes": PICTURE}])
    files = write_rows(tmp_path / "rows.parquet", *rows)
    found = dataset(model, files)
    ids, row = found[0]
    assert ids == [7, tiny.START, *[tiny.IMAGE] * 6, tiny.STOP, 8]
    assert [(h.grid, h.starts) for h in row.media] == [((1, 6, 4), (2,))]
    ids, row = found[1]
    assert [(h.grid, h.starts) for h in row.media] == [((1, 4, 8), (1,)), ((1, 6, 4), (12,))]
    assert ids == [2, *[tiny.IMAGE] * 8, 3, 9, 2, *[tiny.IMAGE] * 6, 3]
    short = dataset(model, files, max_prompt_length=12, filter_overlong_prompts=True)
    assert [short[i] for i in range(len(short))] == [found[0]]
    cut = dataset(model, files, max_prompt_length=12, truncation="left")
    with pytest.raises(ValueError, match=r"row 1: the prompt has 19 tokens, more than data.max_prompt_length=12"):
        cut[1]


def test_rows_that_do_not_fit_their_images(model: Path, tmp_path: Path) -> None:
    picture = {"bytes": PICTURE}
    two = write_rows(tmp_path / "two.parquet", ("<image><image>", [picture] * 2))
    with pytest.raises(ValueError, match=r"row 0 has 2 images, more than actor_rollout_ref.rollout.limit_images=1"):
        dataset(model, two, limit_images=1)[0]
    own = write_rows(tmp_path / "own.parquet", ("<image><|image_pad|>", [picture]))
    with pytest.raises(ValueError, match=r"row 0: the chat template made 2 image placeholders \(token 4\) of 1 images"):
        dataset(model, own)[0]
    other = write_rows(tmp_path / "other.parquet", ("<image>", [picture]), column="pictures")
    with pytest.raises(ValueError, match=r"has <image>, but the file has no column 'images' \(data.image_key\)"):
        dataset(model, other).check_rows()
    assert len(dataset(model, other, image_key="pictures")[0][1].media) == 1
    none = write_rows(tmp_path / "none.parquet", ("<image>", [picture]), ("<image>", []))
    with pytest.raises(ValueError, match=r"row 1: the prompt has 1 <image> tags, but the row has 0 images"):
        dataset(model, none)[1]


def test_the_processor_of_the_folder(model: Path, tmp_path: Path) -> None:
    image = tiny.write_images(tmp_path / "rows.parquet", [[{"bytes": tiny.picture(0, 112, 112)}]])[0]
    assert vision(model).expand([tiny.IMAGE], image, 1)[1][0].grid == (1, 8, 8)
    assert vision(model, mm_processor_kwargs={"max_pixels": 56 * 56}).expand([tiny.IMAGE], image, 1)[1][0].grid[1] == 4
    with pytest.raises(ValueError, match=r"model.mm_processor_kwargs.max_pixel is unknown to the image processor"):
        vision(model, mm_processor_kwargs={"max_pixel": 1})
    bare = tmp_path / "bare"
    tiny.tiny_vision("qwen2_vl").config.save_pretrained(bare)
    with pytest.raises(ValueError, match=r"its image processor \(preprocessor_config.json\) cannot be loaded"):
        vision(bare)
    for wrong in ({"temporal_patch_size": 1}, {"do_resize": False}):
        with pytest.raises(ValueError, match=r"model.mm_processor_kwargs"):
            vision(model, mm_processor_kwargs=wrong)
    placed = vision(model).expand([tiny.IMAGE], image, 1)[1][0]
    with pytest.raises(MediaError, match=r"gives \(1, 8, 8\) patches, but its prompt was made for \(1, 2, 2\)"):
        vision(model).pixels(dataclasses.replace(placed, grid=(1, 2, 2), path=placed.path, number=0, source=""))


def test_geometry3k(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Written with images in row groups of their own size, read as verl's rows, graded by verl's rule."""
    raw = {"problem": "<image>Find x.", "answer": "3", "images": [{"bytes": PICTURE, "path": "a.png"}]}
    pq.write_table(pa.Table.from_pylist([raw] * 150), tmp_path / "train-00000-of-00001.parquet")
    geometry3k.main(["--local_dataset_path", str(tmp_path), "--local_save_dir", str(tmp_path / "out")])
    assert "bytes>" in capsys.readouterr().out
    written = tmp_path / "out" / "train.parquet"
    assert pq.ParquetFile(written).num_row_groups == 2
    row = dataset(model, written, max_prompt_length=500).row(149)
    assert row.messages[0]["content"][0] == {"type": "image"} and header(row.media[0], 1) == (56, 84)
    score = compute_score(row.data_source, r"<think>so</think> \boxed{3}", row.ground_truth, {})
    assert score["acc"] == 1
    with pytest.raises(ValueError, match="record 4 of train: 1 <image> tags, but 0 images"):
        geometry3k.to_row(raw | {"images": None}, 4, "train")
