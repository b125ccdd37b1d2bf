"""Values that all other packages share: options, requests, outputs, errors, and checks of them.

It imports nothing of this project. `config` has the options of an engine (declared in `options`),
`request` a request once it was checked, `outputs` what becomes of it, and `validation` the rules.
"""
