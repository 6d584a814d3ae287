"""A tool role that writes Python: the program is found in its answer, run in the sandbox, and reported."""

import dataclasses
import re
from collections.abc import Iterator

from mallm.envs import sandbox
from mallm.envs.sandbox import DEFAULT, Limits, Verdict

FENCE = re.compile(r'[ \t]*(`{3,}|~{3,})[ \t]*([^`\s]*)[^`]*')
PYTHON = {'python', 'python3', 'py', 'py3', 'python2', 'ipython', 'pycon'}


def after_thoughts(text: str) -> str:
    """What follows the last `</think>`; nothing of a thought that was begun and never ended."""
    return text.rpartition('</think>')[2].partition('<think>')[0]


def blocks(text: str) -> Iterator[tuple[str, str, bool]]:
    """(language in small letters, content, closed) of every fenced block, in order."""
    fence, language, lines = '', '', list[str]()
    for line in text.split('\n'):
        found = FENCE.fullmatch(line.rstrip('\r'))
        if not fence and found:
            fence, language, lines = found[1], found[2].lower().strip('{}.'), []
        elif fence and found and found[1].startswith(fence) and not found[2]:
            yield language, '\n'.join(lines), True
            fence = ''
        elif fence:
            lines.append(line)
    if fence:
        yield language, '\n'.join(lines), False


def extract_code(text: str) -> str | None:
    """The program of an answer, or None.

    That is the last closed block after the thoughts that is said to be Python, else the last closed one without a
    language, else a last one that was never closed. Text outside of blocks is never a program.
    """
    found = [block for block in blocks(after_thoughts(text)) if block[0] in PYTHON or not block[0]]
    ranked = (
        [code for language, code, closed in found if closed and language],
        [code for language, code, closed in found if closed],
        [code for _, code, _ in found],
    )
    return next((codes[-1] for codes in ranked if codes and codes[-1].strip()), None)


def is_python(verdict: Verdict) -> bool:
    """Whether a program could be compiled."""
    return not verdict.stderr.rstrip().rpartition('\n')[2].startswith(('SyntaxError', 'IndentationError', 'TabError'))


@dataclasses.dataclass(frozen=True)
class ToolRun:
    """What a tool's answer came to.

    Attributes:
      code: the program in it, or None.
      verdict: what became of the program, or None without one.
    """

    code: str | None
    verdict: Verdict | None

    @property
    def ok(self) -> bool:
        return self.verdict is not None and self.verdict.ok

    @property
    def stdout(self) -> str:
        return self.verdict.stdout if self.verdict else ''

    def shown(self, longest: int = 1000) -> str:
        """The report for the next role: output, and how it ended if not well; each at most `longest` characters."""
        if self.verdict is None:
            return 'There was no ```python block to run.'
        said = cut(self.verdict.stdout.rstrip(), longest) or '(nothing was printed)'
        if self.verdict.ok:
            return said
        why = self.verdict.stderr.rstrip().rpartition('\n')[2]
        return f'{said}\nThe program failed ({self.verdict.status}). {cut(why, longest)}'.rstrip()


def cut(text: str, longest: int) -> str:
    """The text, without its middle where it is too long."""
    if len(text) <= longest:
        return text
    half = longest // 2
    return f'{text[:half]}\n[... {len(text) - 2 * half} characters left out ...]\n{text[-half:]}'


def run_python_tool(text: str, stdin: str = '', limits: Limits = DEFAULT) -> ToolRun:
    """Runs the program in an answer. No text raises; a broken sandbox does (SandboxError)."""
    code = extract_code(text)
    return ToolRun(code, None if code is None else sandbox.run(code, stdin, limits))


ISOLATED = dataclasses.replace(DEFAULT, isolated=True)


def run_isolated(text: str, stdin: str = '') -> ToolRun:
    """`run_python_tool`, refused (SandboxError) where a wall of the sandbox is missing."""
    return run_python_tool(text, stdin, ISOLATED)
