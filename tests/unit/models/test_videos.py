"""Videos of rows: every form, which frames are taken, every way in which they can be wrong, prompts and positions."""

from __future__ import annotations

import base64
import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
import torch

from tests.unit.models import tiny_vision as tiny
from tests.unit.models.test_images import dataset, vision
from verl_like.batch import MediaHandle
from verl_like.models.images import MediaError
from verl_like.models.videos import clip_of, frames_of


def write_video(path: Path, frames: int = 23, fps: float = 10, kind: str = "MJPG") -> bytes:
    """Each frame is grey, 10 times its number."""
    cv2 = pytest.importorskip("cv2")
    writer = cv2.VideoWriter(str(path), cv2.VideoWriter_fourcc(*kind), fps, (64, 48))
    for number in range(frames):
        writer.write(np.full((48, 64, 3), number * 10, np.uint8))
    writer.release()
    return path.read_bytes()


def handle(folder: Path, cell: Any) -> MediaHandle:
    return MediaHandle(kind="video", path=str(folder / "a.jsonl"), column="videos", row=0, number=0, source=cell)


def greys(found: MediaHandle) -> list[int]:
    """The numbers of the frames, as their pixels show them."""
    return [round(float(np.asarray(frame).mean()) / 10) for frame in frames_of(found, clip_of(found))]


@pytest.mark.parametrize("form", ["bytes", "path", "file", "url", "data", "hugging face", "verl"])
def test_every_form_of_a_video(tmp_path: Path, form: str) -> None:
    """Four frames: 2.3 s at the usual 2 a second."""
    data = write_video(tmp_path / "a.avi")
    with fsspec.open("memory://videos/a.avi", "wb") as file:
        file.write(data)  # pyright: ignore[reportAttributeAccessIssue]
    cell = {
        "bytes": data,
        "path": "a.avi",
        "file": f"file://{tmp_path / 'a.avi'}",
        "url": "memory://videos/a.avi",
        "data": f"data:video/avi;base64,{base64.b64encode(data).decode()}",
        "hugging face": {"bytes": data, "path": None},
        "verl": {"type": "video", "video": str(tmp_path / "a.avi"), "fps": None, "max_frames": 768},
    }[form]
    found = handle(tmp_path, cell)
    clip = clip_of(found, 1)
    assert (clip.size, clip.numbers, clip.fps) == ((64, 48), (0, 7, 15, 22), 10)
    assert clip.sampled_fps == pytest.approx(4 / 2.3)
    assert greys(found) == [0, 7, 15, 22]
    assert clip.times(2) == pytest.approx([0.35, 1.85])


def test_frames_of_a_compressed_video(tmp_path: Path) -> None:
    """Frames that are differences from others are decoded in order."""
    write_video(tmp_path / "a.mp4", kind="mp4v")
    assert greys(handle(tmp_path, {"video": "a.mp4", "nframes": 12})) == list(range(0, 23, 2))


@pytest.mark.parametrize(
    ("options", "numbers"),
    [
        ({"fps": 5}, np.linspace(0, 22, 10)),
        ({"fps": 1}, np.linspace(0, 22, 4)),  # min_frames
        ({"fps": 1, "min_frames": 2}, [0, 22]),
        ({"fps": 10, "max_frames": 7}, np.linspace(0, 22, 6)),
        ({"nframes": 7}, np.linspace(0, 22, 8)),
        ({"fps": 2, "video_start": 0.5, "video_end": 1.4}, np.linspace(5, 14, 4)),
    ],
)
def test_which_frames_are_taken(tmp_path: Path, options: dict[str, float], numbers: Any) -> None:
    """As qwen-vl-utils takes them."""
    write_video(tmp_path / "a.avi")
    assert list(clip_of(handle(tmp_path, {"video": "a.avi", **options})).numbers) == np.round(numbers).tolist()


def test_lists_of_frames(tmp_path: Path) -> None:
    frames = tiny.film(1, 3, 56, 56)
    (tmp_path / "0.png").write_bytes(frames[0])
    cell = ["0.png", {"bytes": frames[1]}, f"data:image/png;base64,{base64.b64encode(frames[2]).decode()}"]
    found = handle(tmp_path, {"video": cell, "sample_fps": 4})
    clip = clip_of(found)
    assert clip.times(2) == pytest.approx([0.125, 0.5])  # the last is there twice
    assert [frame.size for frame in frames_of(found, clip)] == [(56, 56)] * 3


@pytest.mark.parametrize(
    ("cell", "message"),
    [
        ("no.avi", r"row 0: video 0 of column 'videos': 'no.avi' cannot be read: No such file"),
        ("memory://no.avi", r"cannot be read"),
        (b"no video", r"is no video that OpenCV can open \(8 bytes\)"),
        ("a.jsonl", r"is no video that OpenCV can open \(.*a.jsonl\)"),
        ({"bytes": None}, r"holds no video"),
        ({"video": []}, r"holds no video"),
        ([], r"holds no video"),
        ({"video": "a.avi", "fsp": 2}, r"'fsp' is no option of a video; they are fps, max_frames"),
        ({"video": "a.avi", "fps": 0}, r"fps=0 must be a number above 0"),
        ({"video": "a.avi", "nframes": 40}, r"40 frames are asked for .*nframes.* of 23 in this time \(23 in all\)"),
        ({"video": "a.avi", "video_start": 9}, r"of 0 in this time \(23 in all\): 2 at least"),
        ({"video": ["0.png"] * 3, "max_frames": 2}, r"has 3 frames, more than max_frames=2: leave some out"),
        (["0.png", "1.png"], r"a frame has \(28, 28\) pixels, the video \(56, 56\)"),
    ],
)
def test_a_wrong_video_is_named(tmp_path: Path, cell: Any, message: str) -> None:
    write_video(tmp_path / "a.avi")
    (tmp_path / "a.jsonl").write_text("{}")
    (tmp_path / "0.png").write_bytes(tiny.picture(0, 56, 56))
    (tmp_path / "1.png").write_bytes(tiny.picture(0, 28, 28))
    found = handle(tmp_path, cell or {"video": cell})
    with pytest.raises(MediaError, match=message):
        greys(found)


def test_a_video_that_is_cut_off_or_too_large(tmp_path: Path) -> None:
    write_video(tmp_path / "a.avi")
    found = handle(tmp_path, "a.avi")
    longer = dataclasses.replace(clip_of(found), numbers=(0, 20, 40))
    with pytest.raises(MediaError, match=r"cannot be decoded from frame 23 on \(wanted: 40\)"):
        list(frames_of(found, longer))
    with pytest.raises(MediaError, match=r"64 x 48 pixels, more than data.max_image_megapixels=0.001"):
        clip_of(handle(tmp_path, "a.avi"), 0.001)


def test_a_header_that_counts_a_frame_too_many(tmp_path: Path) -> None:
    write_video(tmp_path / "a.avi", frames=23)
    found = handle(tmp_path, "a.avi")
    clip = dataclasses.replace(clip_of(found), numbers=(0, 10, 23))
    assert [round(float(np.asarray(frame).mean()) / 10) for frame in frames_of(found, clip)] == [0, 10, 22]


def test_without_opencv(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cv2", None)
    with pytest.raises(MediaError, match=r"takes OpenCV: pip install 'verl_like\[video\]', or give their frames"):
        clip_of(handle(tmp_path, b"data"))


@pytest.fixture(scope="module", params=tiny.FAMILIES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp(request.param)
    tiny.save(folder, request.param)
    return folder


def test_rows_with_videos(model: Path, tmp_path: Path) -> None:
    """Of 64 x 48 pixels 2 x 2 tokens, twice; Qwen3-VL says when. Images may stand before them."""
    write_video(tmp_path / "a.avi", frames=4, fps=3)
    (tmp_path / "a.png").write_bytes(tiny.picture(0, 56, 28))
    row = {"prompt": "w1<video>w2<image>", "videos": ["a.avi"], "images": ["a.png"], "answer": "1"}
    files = tmp_path / "rows.jsonl"
    files.write_text(json.dumps(row))
    ids, found = dataset(model, files, ground_truth_key="answer")[0]
    film = [tiny.VIDEO] * 4
    if model.name.startswith("qwen3"):
        at = (4, 11)
        film = [token for when in tiny.SECONDS for token in (when, tiny.START, *film, tiny.STOP)]
    else:
        at, film = (2,), film * 2
    assert ids == [7, tiny.START, *film, tiny.STOP, 8, tiny.START, *[tiny.IMAGE] * 2, tiny.STOP]
    assert [(h.kind, h.grid) for h in found.media] == [("video", (2, 4, 4)), ("image", (1, 2, 4))]
    assert found.media[0].starts == at


def test_pixels_have_bounds(model: Path, tmp_path: Path) -> None:
    """Of a row, of the run, and of the folder: of each frame, or (Qwen3-VL) of all together."""
    cell = {"video": [{"bytes": frame} for frame in tiny.film(0, 8, 224, 224)]}

    def grid(own: dict[str, int], **settings: Any) -> tuple[int, ...]:
        return vision(model, **settings).expand([tiny.VIDEO], [handle(tmp_path, cell | own)], 1)[1][0].grid

    assert grid({}) == ((4, 4, 4) if model.name.startswith("qwen3") else (4, 8, 8))
    assert grid({"max_pixels": 56 * 56}) == (4, 4, 4)
    assert grid({}, mm_processor_kwargs={"max_pixels": 56 * 56}) == (
        (4, 2, 2) if model.name.startswith("qwen3") else (4, 4, 4)
    )


def test_text_after_a_long_video_comes_after_its_end(model: Path, tmp_path: Path) -> None:
    """By hand: 6 times of one token. transformers would go on from its height, in the midst of it."""
    cell = {"video": [{"bytes": frame} for frame in tiny.film(0, 12, 28, 28)], "sample_fps": 3}
    ids, media = vision(model).expand([7, tiny.START, tiny.VIDEO, tiny.STOP], [handle(tmp_path, cell)], 1)
    found = vision(model).positions(len(ids), media)
    if model.name.startswith("qwen3"):
        assert torch.equal(found, torch.arange(len(ids)).expand(3, -1))
        return
    times = [0, 2, 5, 8, 10, 13] if model.name.startswith("qwen2_5") else [0, 1, 2, 3, 4, 5]  # 4 x 2/3 s
    assert found[0].tolist() == [0, 1, *[2 + time for time in times], 3 + times[-1]]
    assert found[1].tolist() == [0, 1, *[2] * 6, 3 + times[-1]]


def test_a_video_is_another_now(model: Path, tmp_path: Path) -> None:
    cell = [{"bytes": frame} for frame in tiny.film(0, 4, 56, 56)]
    _, (found,) = vision(model).expand([tiny.VIDEO], [handle(tmp_path, cell)], 1)
    with pytest.raises(MediaError, match=r"gives \(1, 4, 4\) patches, but its prompt was made for \(2, 4, 4\)"):
        vision(model).pixels(dataclasses.replace(found, source=cell[:2]))


def test_saved_models_keep_their_settings(model: Path, tmp_path: Path) -> None:
    vision(model).save(tmp_path)
    assert (tmp_path / "video_preprocessor_config.json").exists() == model.name.startswith("qwen3")
