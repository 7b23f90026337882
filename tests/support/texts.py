"""Texts of several kinds, for tests of tokenizers and of the data pipeline."""

import argparse
import inspect
import json

PYTHON = inspect.getsource(argparse.ArgumentParser)

C_LIKE = """#include <stdio.h>
/* Greatest common divisor, tabs and all. */
static unsigned gcd(unsigned a, unsigned b)
{
\twhile (b) {
\t\tunsigned r = a % b;\r
\t\ta = b; b = r;
\t}
\treturn a;
}

int main(void) { printf("%u\\n", gcd(1071u, 462u)); return 0; }
"""

LATEX = r"""\section{Conditionally positive definite kernels}
A kernel $k:\mathcal{X}\times\mathcal{X}\to\mathbb{R}$ is \emph{CPD} if for all $c_i\in\mathbb{R}$ with $\sum_i c_i=0$,
\begin{equation}\label{eq:cpd}
  \sum_{i=1}^{N}\sum_{j=1}^{N} c_i c_j\, k(x_i,x_j) \ge 0 .  % no diagonal needed
\end{equation}
By \eqref{eq:cpd}, $-\lVert x-x'\rVert^{p}$ with $0<p\le 2$ is one;
so is $-r_1\log(1+r_2\lVert x-x'\rVert)$~\cite{schoenberg}.
"""  # noqa: E501

# Article 1 of the Universal Declaration of Human Rights, and characters that tokenizers often get
# wrong.
UNICODE = """All human beings are born free and equal in dignity and rights.
Alle Menschen sind frei und gleich an Würde und Rechten geboren.
Все люди рождаются свободными и равными в своем достоинстве и правах.
すべての人間は、生まれながらにして自由であり、かつ、尊厳と権利とについて平等である。
يولد جميع الناس أحرارًا متساوين في الكرامة والحقوق.
सभी मनुष्यों को गौरव और अधिकारों के मामले में जन्मजात स्वतन्त्रता और समानता प्राप्त है।
모든 인간은 태어날 때부터 자유로우며 그 존엄과 권리에 있어 동등하다.
e\u0301 \u00e9 \ufb01
\u200b\u200d \U0001f468\u200d\U0001f469\u200d\U0001f467 \U0001d538 \u00a0\u2028\u3000\x00\x1c\x85 \ufeff
\ufffd\n\n \n\t \n
"""  # noqa: E501

LONG_LINE = json.dumps(
    {str(number): [number, number**3, f"value {number * 7919 % 1009}"] for number in range(4000)}
)

NUMBERS = "\n".join(f"{number:6d}  {number / 7:.12f}  0x{number:x}" for number in range(300)) + "\n"

KINDS = {
    "python": PYTHON,
    "c": C_LIKE,
    "latex": LATEX,
    "unicode": UNICODE,
    "long line": LONG_LINE,
    "numbers": NUMBERS,
    "special": "I've said <|endoftext|> and  <|endoftext|>\n it's   we'll'd \n",
}
