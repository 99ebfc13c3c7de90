"""Recordings: times and plans of calls, kept while they run, and their files."""

from ultraep_comm.recording.file import (
    Known,
    Recording,
    load_recording,
    load_recordings,
    save_recording,
)

__all__ = ["Known", "Recording", "load_recording", "load_recordings", "save_recording"]
