"""The earlier name of niels_gpt.exchange, kept for one release: importing it warns, and gives the same functions."""

from __future__ import annotations

from niels_gpt.storage.codes import give_earlier_names

_MOVED = {
    "exporting": {"export_cache": "exchange.exporting", "Exported": "exchange.exporting"},
    "importing": {"Imported": "exchange.importing"},
    "transfer": {},
    "transfer.push": {"push": "exchange.transfer.push"},
    "transfer.described": {"Pushed": "exchange.transfer.described"},
    "transfer.fetch": dict.fromkeys(("pull", "stage", "Fetched"), "exchange.transfer.fetch"),
    "card": {"card_of": "exchange.card"},
}
"""The documented names of each module, and the module that has them now; a package first."""

give_earlier_names(
    __name__, _MOVED, "niels_gpt.interop is niels_gpt.exchange now: import the names of docs/api/exchange.md from there"
)
