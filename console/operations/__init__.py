"""What operators look at: logs, metrics, traces, health. The one rule: watching the console never stops it.

`context`, `logs`, `tracing` and `signs` are floor: they import no room. `figures`, `metrics` and `health` are
roof: they read from all rooms, and nobody but the addresses and the first middleware imports them.
"""
