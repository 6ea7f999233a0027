"""Recordings: formats, resampling, windows, limits."""

from __future__ import annotations

import io
import itertools
import sys
import wave
from typing import Any

import av
import numpy as np
import pytest
from support.speech import RATE, SPEECH

from fastkernels.engine.speech.files import AudioError, MissingPackage, Recording, recording


def wav(samples: np.ndarray, rate: int = RATE, channels: int = 1) -> bytes:
    made = io.BytesIO()
    with wave.open(made, "wb") as file:
        file.setnchannels(channels)
        file.setsampwidth(2)
        file.setframerate(rate)
        file.writeframes((samples * 32767).astype("<i2").tobytes())
    return made.getvalue()


def tone(seconds: float, rate: int) -> np.ndarray:
    return (0.5 * np.sin(2 * np.pi * 440 * np.arange(round(seconds * rate)) / rate)).astype(np.float32)


def encoded(codec: str, kind: str, samples: np.ndarray, rate: int) -> bytes:
    made = io.BytesIO()
    with av.open(made, "w", format=kind) as container:
        stream: Any = container.add_stream(codec, rate=rate, layout="mono")
        size = stream.codec_context.frame_size or 1024
        convert = av.AudioResampler(stream.format.name, "mono", rate)
        for at in range(0, len(samples), size):
            frame = av.AudioFrame.from_ndarray(samples[None, at : at + size], "flt", "mono")
            frame.sample_rate, frame.pts = rate, at
            for part in convert.resample(frame):
                container.mux(stream.encode(part))
        container.mux(stream.encode(None))
    return made.getvalue()


def everything(given: Any) -> np.ndarray:
    found = recording(given, RATE)
    made = found.window(0, 10 * RATE)
    assert found.length == len(made)
    return made


@pytest.mark.parametrize(
    ("codec", "kind"),
    [("flac", "flac"), ("mp3", "mp3"), ("libopus", "ogg"), ("aac", "mp4"), ("libopus", "webm"), ("pcm_s16le", "wav")],
)  # fmt: skip
def test_formats_are_read(codec: str, kind: str) -> None:
    rate = 48_000
    made = everything(encoded(codec, kind, tone(1.5, rate), rate))
    assert abs(len(made) - 1.5 * RATE) < 0.1 * RATE
    spectrum = np.abs(np.fft.rfft(made[4000:20000] * np.hanning(16000)))
    assert spectrum.argmax() == 440  # Hz
    assert made[4000:20000].std() == pytest.approx(0.5 / 2**0.5, rel=0.06)


def test_samples_are_resampled_to_one_channel() -> None:
    left = tone(1.0, 44_100)
    stereo = np.stack([left, np.zeros_like(left)], 1)
    for given in (wav(stereo, 44_100, 2), (left / 2, 44_100)):
        made = everything(given)
        assert abs(len(made) - RATE) < 40
        assert np.abs(made[100:15000] - tone(1.0, RATE)[100:15000] / 2).max() < 2e-3
    own = tone(0.3, RATE)
    assert np.array_equal(everything(own), own) and np.array_equal(everything((own, RATE)), own)
    assert everything(wav(own)) == pytest.approx(own, abs=1e-4)


@pytest.mark.parametrize("channels", [2, 3, 6, 8])
def test_equal_channels_are_as_loud_as_one(channels: int) -> None:
    one = tone(0.2, RATE)
    assert everything(wav(np.stack([one] * channels, 1), RATE, channels)) == pytest.approx(one, abs=1e-4)


def test_windows_are_read_once_and_in_order() -> None:
    read: list[int] = []

    def blocks() -> Any:
        for i in range(10):
            read.append(i)
            yield np.arange(i * 100, (i + 1) * 100, dtype=np.float32)

    made = Recording(blocks(), 100)
    for start, count in ((0, 250), (30, 250), (30, 100), (600, 50), (640, 500)):
        want = np.arange(start, min(start + count, 1000))
        assert np.array_equal(made.window(start, count), want)
        assert made._kept.nbytes <= 4 * (count + 350)
    assert read == list(range(10)) and made.seconds == 10.0
    assert len(made.window(1000, 10)) == 0


def test_path_file_and_bytes_are_the_same(tmp_path: Any) -> None:
    data = SPEECH.read_bytes()
    want = recording(data, RATE).window(0, 20 * RATE)
    assert 12 < len(want) / RATE < 14
    with SPEECH.open("rb") as file:
        for given in (SPEECH, str(SPEECH), file):
            assert np.array_equal(recording(given, RATE).window(0, 20 * RATE), want)
    with pytest.raises(AudioError, match=r"the audio file cannot be read: .*No such file"):
        recording(tmp_path / "none.wav", RATE)


PLAYLIST = b"#EXTM3U\n#EXT-X-TARGETDURATION:5\n#EXTINF:5,\nfile:///etc/hostname\n#EXT-X-ENDLIST\n"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (b"", "the file is damaged, or no audio file: use flac, m4a"),
        (b"noise" * 500, "the file is damaged, or no audio file"),
        (PLAYLIST, "the file is damaged, or no audio file"),
        (b"ffconcat version 1.0\nfile /etc/hostname\n", "the file is damaged, or no audio file"),
        (wav(tone(0.2, 8000))[:20], "the file is damaged, or no audio file"),
        (wav(tone(0.2, 8000), 1), "a sampling rate of 1 Hz, and 4000 to 384000 are possible"),
        ((tone(0.2, 8000), 1), "a sampling rate of 1 Hz"),
        ((tone(0.2, 8000), 0), "a sampling rate of 0 Hz"),
        ((tone(0.2, 8000), "8000"), "their rate in Hz, an integer.: 'str' object"),
        (("a.wav", "b.wav"), "the audio must be a path, the bytes of a file"),
        (np.zeros((2, 30)), r"samples of one channel \[n\], got shape \[2, 30\]"),
        (np.broadcast_to(np.float32(0), 5 * 3600 * RATE), "the audio has 5 h 00 min, and at most 4 h 00 min"),
    ],
)  # fmt: skip
def test_bad_recordings_are_refused(given: Any, message: str) -> None:
    with pytest.raises(AudioError, match=message):
        recording(given, RATE)


def test_length_is_limited_before_decoding() -> None:
    data = bytearray(encoded("flac", "flac", tone(0.1, RATE), RATE))
    assert data[:4] == b"fLaC"
    total = int.from_bytes(data[18:26], "big") >> 36 << 36 | 5 * 3600 * RATE
    data[18:26] = total.to_bytes(8, "big")
    with pytest.raises(
        AudioError, match="the audio has 5 h 00 min, and at most 4 h 00 min are possible: cut"
    ):
        recording(bytes(data), RATE)


def test_length_is_limited_while_decoding() -> None:
    block = np.zeros(3600 * 100, np.float32)
    endless = Recording(itertools.repeat(block), 100)
    with pytest.raises(AudioError, match="the audio is longer than 4 h 00 min"):
        for start in range(0, 5 * 3600 * 100, 30 * 100):
            endless.window(start, 30 * 100)


def test_damaged_packets_are_left_out() -> None:
    """A few of them; a file of nothing else is refused."""
    data = bytearray(encoded("mp3", "mp3", tone(4.0, RATE), RATE))
    some = bytearray(data)
    some[5000:5400] = bytes(400)
    assert len(recording(bytes(some), RATE).window(0, 5 * RATE)) > 3.5 * RATE
    flac = bytearray(encoded("flac", "flac", tone(4.0, RATE), RATE))
    flac[len(flac) // 4 :] = np.random.default_rng(0).bytes(len(flac) - len(flac) // 4)
    kept = recording(bytes(flac), RATE).window(0, 5 * RATE)
    assert len(kept) < 2 * RATE


def test_rate_and_channels_may_change() -> None:
    """As in MP3 files that were joined."""
    parts = [encoded("mp3", "mp3", tone(1.0, rate), rate) for rate in (RATE, 44100)]
    found = recording(b"".join(parts), RATE).window(0, 5 * RATE)
    assert len(found) == pytest.approx(2 * RATE, abs=0.2 * RATE)
    second = found[round(1.3 * RATE) : round(1.7 * RATE)]
    alone = recording(parts[1], RATE).window(0, 2 * RATE)[round(0.3 * RATE) : round(0.7 * RATE)]
    assert second.std() == pytest.approx(alone.std(), rel=0.05)


def test_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "av", None)
    with pytest.raises(MissingPackage, match=r"need the package av: pip install 'fastkernels\[audio\]'"):
        recording(b"RIFF", RATE)
    assert len(recording(np.zeros(30, np.float32), RATE).window(0, 30)) == 30
