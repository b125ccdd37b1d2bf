"""The process that checks grammars: ``python -P -m paged_backend.grammar.compile_process``.

Its arguments are the tokenizer and the size of the model's vocabulary.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from paged_backend.sandbox.server import Answer, answer_lines, problem

TIME_LIMIT_S = 0.5  # processor time; real schemas take milliseconds
MEMORY_LIMIT = 2**29  # bytes, in addition to what the process starts with


def main() -> None:
    """Answer each line of stdin until it is closed."""
    answer_lines(_prepare, time_limit_s=TIME_LIMIT_S, memory_limit=MEMORY_LIMIT)


def _prepare() -> Callable[[Any], Answer]:
    from paged_backend.grammar.check import checked_grammar
    from paged_backend.grammar.errors import ConstraintError
    from paged_backend.grammar.vocabulary import make_vocabulary, special_token_ids
    from paged_backend.text.tokenizer import load_tokenizer
    from paged_backend.values.errors import PagedError
    from paged_backend.values.output_constraint import OutputConstraint

    folder, vocab_size = sys.argv[1:]
    tokenizer = load_tokenizer(folder)
    vocabulary = make_vocabulary(tokenizer, int(vocab_size))
    special = special_token_ids(tokenizer, vocabulary)

    def answer(request: Any) -> Answer:
        try:
            grammar = checked_grammar(vocabulary, special, OutputConstraint.from_json(request))
        except MemoryError:
            return problem(f"it needs over {MEMORY_LIMIT // 2**20} MiB of memory")
        except RecursionError:
            return problem("is nested too deeply")
        except ConstraintError as error:
            return problem(str(error)) | {"field": error.field}
        except (PagedError, ValueError) as error:
            return problem(str(error) or type(error).__name__)
        except Exception as error:  # the translators are other people's code
            return problem(f"it cannot be read ({type(error).__name__})")
        return {"grammar": grammar}

    return answer


if __name__ == "__main__":
    main()
