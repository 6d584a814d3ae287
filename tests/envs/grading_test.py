"""Answers and outputs are judged right on the public pairs, and nothing a model writes runs in this process."""

import asyncio
import concurrent.futures
import pathlib

import pytest

from mallm.envs import sandbox
from mallm.envs.grading import boxed, grade_math, same_output

PAIRS = [
    ('M01', r'\frac{3}{8}', r'\boxed{0.375}', True),
    ('M03', r'\frac{2}{3}', r'\boxed{0.67}', False),
    ('M05', r'1234567', r'\boxed{1,234,567}', True),
    ('M07', r'\{2,3,5\}', r'\boxed{\{5,2,3\}}', True),
    ('M09', r'[0,4)', r'\boxed{[0,4]}', False),
    ('M11', r'(-\infty,-2)\cup(5,\infty)', r'\boxed{x<-2 \text{ or } x>5}', True),
    ('M13', r'\pm 7', r'\boxed{-7, 7}', True),
    ('M15', r'2^{-90}', r'\boxed{2^{-91}}', False),
    ('M17', r'k=1,2,3', r'\boxed{k=2,3,4}', False),
    ('M19', r'5', r'\boxed{x=5}', True),
    ('M21', r'30^\circ', r'\boxed{30}', True),
    ('M23', r'25', r'\boxed{0.25}', False),
    ('M25', r'12\text{ cm}', r'\boxed{12\text{ m}}', False),
    ('M27', r'\frac{7}{2}', r'\boxed{3\frac{1}{2}}', True),
    ('M29', r'e^{12}-3', r'\boxed{-3+exp(12)}', True),
    ('M31', r'14-i', r'\boxed{14.0-1.0i}', True),
    ('M33', r'\text{(C)}', r'\boxed{C}', True),
    ('M34', r'8', r'First I thought \boxed{3}. Checking again it is \boxed{8}.', True),
    ('M38', r'42', r'\fbox{42}', True),
    ('M39', r'7', r'\boxed 7', True),
    ('M41', r'12:00', r'\boxed{1:00}', False),
    ('M43', r'100000', r'\boxed{1.0\times10^{5}}', True),
    ('M45', r'x^2-1', r'\boxed{t^2-1}', False),
    ('M47', r'0', r'\boxed{\emptyset}', False),
    ('M49', r'5', r'\boxed{\infty}', False),
    ('M51', r'1000000', r'\boxed{1000001}', False),
    ('M53', r'\frac{\sqrt{3}}{3}', r'\boxed{\frac{1}{\sqrt{3}}}', True),
    ('M55', r'(1,2),(2,1)', r'\boxed{(1,2)}', False),
    ('braces', r'1/3', r'\boxed{\frac{1}{3}}', True),
    ('braces', r'1/3', r'\boxed{\frac{1}{2}}', False),
    ('braces', r'\frac{12}{3}', r'\boxed{\frac{1}{23}}', False),
    ('one unit', r'12\text{ cm}', r'\boxed{12}', True),
    ('per cent', r'25\%', r'\boxed{0.25}', True),
    ('per cent', r'25', r'\boxed{25\%}', True),
    ('per cent', r'25\%', r'\boxed{25}', True),
    ('per cent', r'25', r'\boxed{0.25\%}', False),
    ('per cent', r'0.25', r'\boxed{0.25\%}', False),
    ('per cent', r'25\%', r'\boxed{0.0025}', False),
    ('per cent', r'0.0025', r'\boxed{25\%}', False),
    ('per cent', r'0.5\%', r'\boxed{0.5}', False),
    ('blank', r'31/2', r'\boxed{3 1/2}', False),
    ('blank', r'12', r'\boxed{1 2}', False),
    ('blank', r'12', r'\boxed{1\,2}', False),
    ('blank', r'3.5', r'\boxed{3. 5}', False),
    ('blank', r'12x', r'\boxed{1 2x}', False),
    ('blank', r'3 1/2', r'\boxed{3\frac{1}{2}}', True),
    ('blank', r'2 x', r'\boxed{2x}', True),
    ('letter', r'3m', r'\boxed{3}', False),
    ('letter', r'3', r'\boxed{3m}', False),
    ('letter', r'3', r'\boxed{x=3m}', False),
    ('letter', r'3m', r'\boxed{3 m}', True),
    ('letter', r'3\text{ m}', r'\boxed{3m}', True),
    ('letter', r'3', r'\boxed{3 m}', True),
    ('letter', r'3n', r'\boxed{3 n}', True),
    ('letter', r'3', r'\boxed{3 n}', False),
    ('letter size', r'x^2-1', r'\boxed{X^2-1}', False),
    ('list', r'5, 125', r'\boxed{5125}', False),
    ('list', r'5125', r'\boxed{5, 125}', False),
    ('thousands', r'5125', r'\boxed{5{,}125}', True),
    ('thousands', r'5\,125', r'\boxed{5125}', True),
    ('decimal comma', r'125', r'\boxed{0,125}', False),
    ('units', r'1\text{ hour}', r'\boxed{1 \text{ hours}}', True),
    ('units', r'2 h', r'\boxed{2 hours}', True),
    ('units', r'2\text{ hours}', r'\boxed{2\text{ minutes}}', False),
    ('units', r'9\text{ cm}^2', r'\boxed{9\text{ square centimeters}}', True),
    ('units', r'9\text{ cm}^2', r'\boxed{9 cm^2}', True),
    ('units', r'9\text{ cm}^2', r'\boxed{9\text{ cm}}', False),
    ('units', r'5', r'\boxed{5 \text{ apples}}', True),
    ('units', r'5', r'\boxed{5 \text{ or } 6}', False),
    ('units', r'5', r'\boxed{5\text{ or 6}}', False),
    ('exponent', r'1E5', r'\boxed{1e5}', True),
    ('exponent', r'1e5', r'\boxed{100000}', True),
    ('words', r'\text{No}', r'\boxed{no}', True),
    ('words', r'\text{no}', r'\boxed{\text{No}}', True),
    ('words', r'\text{No}', r'\boxed{\text{Yes}}', False),
    ('inequality', r'[-1,3)', r'\boxed{-1 \le x < 3}', True),
    ('inequality', r'[-1,3)', r'\boxed{-1 < x < 3}', False),
    ('thoughts', r'8', r'<think>\boxed{8}</think> It is 9.', False),
    ('thoughts', r'8', r'<think>\boxed{8}', False),
    ('no box', r'8', r'8', False),
    ('spaces', r'\text{no solution}', r'\boxed{ \text{no  solution} }', True),
    ('matrix', r'\begin{pmatrix}1&2\\3&4\end{pmatrix}', r'\boxed{\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}}', True),
    ('infinity', r'\infty', r'\boxed{+\infty}', True),
    ('approximation', r'e', r'\boxed{2.718281828}', False),
    ('words', r'\text{Monday}', r'\boxed{monday}', True),
    ('variables', r'ab', r'\boxed{AB}', False),
    ('form', r'(x+1)^2', r'\boxed{x^2+2x+1}', True),
]


@pytest.mark.parametrize('name, gold, answer, right', PAIRS, ids=[f'{i}-{p[0]}' for i, p in enumerate(PAIRS)])
def test_an_answer_is_right_where_a_careful_person_says_so(name, gold, answer, right):
    grade = grade_math(gold, boxed(answer))
    assert (grade.right, grade.sure) == (right, True)


HOSTILE = [
    r"\boxed{__import__('os').system('touch MARK')}",
    r"\boxed{[__import__('os').getpid()]*\pi}",
    r'\boxed{().__class__.__mro__}',
    r'\boxed{9^{9^{9^{9}}}}',
    '\\boxed{' + '\\frac{' * 400 + '1',
    '\\boxed{' + '(' * 1500 + '}',
    '\\boxed{\x00\ud800}',
]


@pytest.mark.parametrize('text', HOSTILE, ids=range(len(HOSTILE)))
def test_text_that_would_like_to_be_run_is_a_wrong_answer_and_the_next_right_one_counts(text, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert not grade_math(r'\sqrt{2}', boxed(text)).right
    assert grade_math(r'\frac{\sqrt{3}}{6}', r'\frac{1}{2\sqrt{3}}').right
    assert list(tmp_path.iterdir()) == [] and not pathlib.Path('MARK').exists()


def test_a_thread_and_an_executor_of_an_event_loop_grade_as_the_main_thread_does():
    grade_math.cache_clear()

    async def in_executor() -> bool:
        loop = asyncio.get_running_loop()
        return (await loop.run_in_executor(None, grade_math, r'\sqrt{8}', r'2\sqrt{2}')).right

    assert asyncio.run(in_executor())
    with concurrent.futures.ThreadPoolExecutor() as pool:
        assert pool.submit(grade_math, r'\sqrt{12}', r'2\sqrt{3}').result().right


OUTPUTS = [
    ('C01', '1 2\n3\n', '1 2 \n3', True),
    ('C03', '0.333333333333\n', '0.333333\n', True),
    ('C03 off', '0.333333333333\n', '0.33333\n', False),
    ('C05', '3\n', '3.0000001\n', False),
    ('C07', ' *\n***\n', '*\n***\n', False),
    ('C09', '', '', True),
    ('C09 line', '', '\n', True),
    ('a line more', '1\n', '1\n2\n', False),
    ('tokens on one line', '1\n2\n', '1 2\n', False),
    ('nan', '0.5\n', 'nan\n', False),
    ('inf', '1e400\n', '0.5\n', False),
    ('case', 'YES\n', 'yes\n', False),
    ('windows', '1\r\n2\r\n', '1\n2\n', True),
    ('big', '123456789012345678901\n', '123456789012345678902\n', False),
]


@pytest.mark.parametrize('name, expected, got, same', OUTPUTS, ids=[row[0] for row in OUTPUTS])
def test_an_output_passes_where_it_says_the_same(name, expected, got, same):
    assert same_output(expected, got) is same


def test_a_tolerance_of_ones_own_decides_how_near_a_number_has_to_be():
    assert same_output('0.333333333333\n', '0.33333\n', tolerance=1e-4)
    assert not same_output('0.333333333333\n', '0.333333\n', tolerance=1e-9)


def test_token_mode_forgets_lines_and_indentation():
    assert same_output(' *\n***\n', '* ***', tokens=True)


@pytest.mark.parametrize(
    'program, output, passes',
    [
        ("import sys\nsys.stdout.buffer.write(b'5\\n')", '5\n', True),  # C11
        ("def main():\n    print('ok')\n\nif __name__ == '__main__':\n    main()", 'ok\n', True),  # C13
        ('print(7)\nraise ValueError', '7\n', False),  # C17
        ("raise ValueError('bad')", 'error: bad\n', False),  # C25
    ],
)
def test_a_program_passes_by_its_own_output_and_a_clean_exit(program, output, passes):
    verdict = sandbox.run(program)
    assert (verdict.ok and same_output(output, verdict.stdout)) is passes
