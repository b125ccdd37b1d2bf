"""What measures, plans and demonstrates; no part of serving imports it.

Each package is one subcommand of ``paged-backend``, and so is `quantize`; `machine`, `scrape` and
`workloads` are shared.
"""
