"""Images of rows: every form they come in, every way in which they can be wrong, and the prompts they make longer."""

from __future__ import annotations

import base64
import dataclasses
import io
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from numpy.typing import NDArray
from PIL import Image
from PIL.PngImagePlugin import PngImageFile
from transformers.image_utils import load_image

from tests.unit.models import tiny_vision as tiny
from verl_like.batch import MediaHandle
from verl_like.config import DataConfig, ModelConfig
from verl_like.data.dataset import PromptDataset
from verl_like.data.loader import read_prompts
from verl_like.kit.datasets import geometry3k
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
        "data": data_url(PICTURE),
        "nested": {"type": "image", "image_url": {"url": "a.png"}},
    }[form]
    found = handle(tmp_path, cell)
    assert header(found, 1) == (56, 84)
    assert decoded(found).size == (56, 84) and decoded(found).mode == "RGB"


_COLOURS = np.random.default_rng(0).integers(0, 256, (28, 20, 3), np.uint8)
SEEN = Image.fromarray(_COLOURS.repeat(2, axis=1))  # 40 wide, 28 high
GREY = np.linspace(0, 1, 28 * 40).reshape(28, 40)
ALPHA = (255 * GREY).round().astype(np.uint8)


def encoded(image: Image.Image, format: str, **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, format, **options)
    return file.getvalue()


def data_url(data: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(data).decode()}"


def shown(data: bytes) -> NDArray[np.int64]:
    """What the model is given; its header says the same size."""
    found = MediaHandle(kind="image", path="", column="images", row=0, number=0, source=data_url(data))
    image = decoded(found)
    assert header(found, 1) == image.size and image.mode == "RGB"
    return np.asarray(image).astype(int)


def theirs(data: bytes) -> NDArray[np.int64]:
    """What transformers shows."""
    return np.asarray(load_image(data_url(data))).astype(int)


@pytest.mark.parametrize("form", ["JPEG", "PNG", "WEBP", "TIFF", "PNG behind the pixels", "JPEG with XMP"])
def test_photographs_are_upright(form: str) -> None:
    for orientation in range(1, 9):
        exif, name = Image.Exif(), form.partition(" ")[0]
        exif[0x0112] = orientation
        data = encoded(SEEN, name, exif=exif)
        if form == "PNG behind the pixels":
            at = data.index(b"eXIf") - 4
            end = at + 12 + int.from_bytes(data[at : at + 4], "big")
            data = data[:at] + data[end:-12] + data[at:end] + data[-12:]
        if form == "JPEG with XMP":
            data = encoded(SEEN, name, xmp=f'<x tiff:Orientation="{orientation}"/>'.encode())
        found = shown(data)
        assert found.shape == ((40, 28, 3) if orientation >= 5 else (28, 40, 3))
        assert (found == theirs(data)).all(), orientation
    assert shown(encoded(SEEN, "JPEG", exif=b"Exif\0\0no EXIF at all")).shape == (28, 40, 3)


def _transparent(form: str) -> tuple[bytes, Image.Image, NDArray[Any]]:
    """A file, its colours and how much of each pixel is seen."""
    if form in ("RGBA", "LA", "WEBP"):
        image = seen = SEEN.convert("L").convert("RGB") if form == "LA" else SEEN
        image = image.copy()
        image.putalpha(Image.fromarray(ALPHA))
        options: Any = {"format": form, "lossless": True, "exact": True} if form == "WEBP" else {"format": "PNG"}
        return encoded(image.convert("LA" if form == "LA" else "RGBA"), **options), seen, ALPHA
    if form in ("P", "P half", "GIF"):
        image = SEEN.quantize(8)
        hidden = {"transparency": bytes([255, 255, 255, 128, 255, 255, 255, 255]) if form == "P half" else 3}
        alpha = np.where(np.asarray(image) == 3, 128 if form == "P half" else 0, 255)
        return encoded(image, "GIF" if form == "GIF" else "PNG", **hidden), image.convert("RGB"), alpha
    image = SEEN.convert(form)
    first: Any = image.getpixel((0, 0))
    seen = np.asarray(image.convert("RGB"))
    alpha = np.where((seen == seen[0, 0]).all(axis=2), 0, 255)
    return encoded(image, "PNG", transparency=int(first > 0) if form == "1" else first), image.convert("RGB"), alpha


@pytest.mark.parametrize("form", ["RGBA", "LA", "WEBP", "P", "P half", "GIF", "RGB", "L", "1"])
def test_what_is_transparent_is_white(form: str) -> None:
    """The ground that vLLM and qwen-vl-utils have; transformers drops alpha, and shows what lies under nothing."""
    data, seen, alpha = _transparent(form)
    share = alpha[..., None] / 255
    found = shown(data)
    assert np.abs(found - (np.asarray(seen) * share + 255 * (1 - share))).max() <= 1
    assert (found[alpha == 0] == 255).all() and found.mean() > theirs(data).mean()


def test_black_lines_on_nothing_are_black_lines_on_white() -> None:
    lines = np.zeros((28, 40, 4), np.uint8)
    lines[::7, :, 3] = 255
    assert shown(encoded(Image.fromarray(lines), "PNG")).mean() == 255 * 24 / 28


@pytest.mark.parametrize(
    ("grey", "form"),
    [
        *[((GREY * 65535).astype(np.uint16), form) for form in ("PNG", "TIFF")],
        *[((GREY * 65535).astype(np.int32), form) for form in ("PPM", "TIFF")],
        ((GREY * (2**31 - 1)).astype(np.int32), "TIFF"),
        *[((GREY * top).astype(np.float32), "TIFF") for top in (1, 255, 65535, 1e9)],
    ],
)
def test_all_depth_of_grey_is_seen(grey: NDArray[Any], form: str) -> None:
    found = shown(encoded(Image.fromarray(grey), form))
    assert np.abs(found - 255 * GREY[..., None]).max() <= 0.51


def test_deep_grey_that_is_dark_or_odd_or_transparent() -> None:
    dark = Image.fromarray(np.array([[0, 255], [510, 128]], dtype=np.uint16))
    assert shown(encoded(dark, "PNG"))[..., 0].tolist() == [[0, 1], [2, 0]]
    odd = np.array([[np.nan, -1.0], [0.5, np.inf]], dtype=np.float32)
    assert shown(encoded(Image.fromarray(odd), "TIFF"))[..., 0].tolist() == [[0, 0], [128, 0]]
    deep = Image.fromarray(np.array([[500, 65535], [32896, 0]], dtype=np.uint16))
    found = shown(encoded(deep, "PNG", transparency=500))
    assert found[..., 0].tolist() == [[255, 255], [128, 0]]


@pytest.mark.parametrize("mode", ["CMYK", "L", "1", "P", "YCbCr"])
def test_other_colours_are_as_transformers_shows_them(mode: str) -> None:
    data = encoded(SEEN.convert(mode), {"CMYK": "JPEG", "YCbCr": "TIFF"}.get(mode, "PNG"))
    assert (shown(data) == theirs(data)).all()


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
        ({"bytes": PICTURE[:16] + bytes(4) + PICTURE[20:]}, r"no image that PIL can open"),
        ({"bytes": PICTURE[:16] + b"\0\1\0\0" * 2 + PICTURE[24:]}, r"no image that PIL can open"),
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


def test_a_size_is_bounded_before_pixels_are_decoded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """PIL decodes all of a PNG to find the EXIF behind its pixels."""
    found, decoded_ones = handle(tmp_path, {"bytes": tiny.picture(0, 1100, 1000) + b"eXIf"}), list[Any]()
    monkeypatch.setattr(PngImageFile, "load", lambda image: decoded_ones.append(image))
    with pytest.raises(MediaError, match=r"more than data\.max_image_megapixels=1"):
        header(found, 1)
    assert not decoded_ones
    header(found, 2)
    assert decoded_ones


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
    assert len(dataset(model, own)[0][1].media) == 1  # a placeholder that the user has typed stays text
    other = write_rows(tmp_path / "other.parquet", ("<image>", [picture]), column="pictures")
    with pytest.raises(ValueError, match=r"has <image>, but the file has no column 'images' \(data.image_key\)"):
        dataset(model, other).check_rows()
    assert len(dataset(model, other, image_key="pictures")[0][1].media) == 1
    none = write_rows(tmp_path / "none.parquet", ("<image>", [picture]), ("<image>", []))
    with pytest.raises(ValueError, match=r"row 1: the prompt has 1 <image> tags, but the row has 0 images"):
        dataset(model, none)[1]


def test_pictures_damaged_behind_their_headers_are_found_at_the_start(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All where that is cheap, else the first rows and some by chance; how many are damaged is told."""
    whole, cut = {"bytes": PICTURE}, {"bytes": PICTURE[: len(PICTURE) // 2]}
    rows = [("<image>", [cut if number in (0, 60) else whole]) for number in range(64)]
    found = dataset(model, write_rows(tmp_path / "rows.parquet", *rows))
    told = (
        r"2 of the 64 rows of data.train_files whose images were decoded are damaged \(64 have some\): leave them out"
    )
    with pytest.raises(MediaError, match=rf"{told}. The first: .*: image 0 of column 'images' cannot be decoded"):
        found.check_rows()
    monkeypatch.setattr("verl_like.data.dataset._DECODING_S", 0.0)
    with pytest.raises(MediaError, match=r"1 of the 1 rows .* \(64 have some\).* row 0: image 0"):
        found.check_rows()
    dataset(model, write_rows(tmp_path / "good.parquet", ("<image>", [whole]), ("w1", []))).check_rows()


def test_a_picture_that_cannot_be_used_is_the_failure_of_its_row(model: Path, tmp_path: Path) -> None:
    cells = [{"bytes": data} for data in (PICTURE, b"nothing", tiny.picture(0, 1200, 1200))]
    cells.append({"bytes": None, "path": "gone.png"})  # type: ignore[dict-item]
    files = write_rows(tmp_path / "rows.parquet", *[("w1<image>w2", [cell]) for cell in cells])
    good, *bad = read_prompts(dataset(model, files, max_image_megapixels=1.0), range(4), range(4))
    assert good.problem == "" and len(good.row.media) == 1
    assert [prompt.ids for prompt in bad] == [[7, tiny.START, tiny.IMAGE, tiny.STOP, 8]] * 3
    assert [prompt.row.media for prompt in bad] == [[]] * 3
    for prompt, what in zip(bad, ("no image that PIL", "more than data.max_image", "cannot be read"), strict=True):
        assert f"row {prompt.position}: image 0" in prompt.problem and what in prompt.problem


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
