"""Recordings of calls, with times and plans: the recorder, and its files."""

from ultraep_comm.recording.file import (
    Known,
    Recording,
    load_recording,
    load_recordings,
    save_recording,
)

__all__ = ["Known", "Recording", "load_recording", "load_recordings", "save_recording"]
