"""A use of each package that OpenAI's graders have, as a grader that does the one which the row names."""

import textwrap

# By the name in OpenAI's list: a function body that returns whether it came out right.
USES = {
    "numpy": "import numpy as np\nreturn np.linalg.norm(np.array([3, 4]) @ np.eye(2)) == 5",
    "scipy": "from scipy import stats\nreturn stats.spearmanr([1, 2, 3], [4, 5, 6]).statistic > 0.999",
    "sympy": "from sympy import simplify, symbols\nx = symbols('x')\nreturn simplify((x**2 - 1) / (x - 1) - x) == 1",
    "pandas": "import pandas as pd\nreturn pd.DataFrame({'k': 'aab', 'v': [1, 2, 3]}.items()).shape == (2, 2)",
    "rapidfuzz": "from rapidfuzz import fuzz\nreturn fuzz.ratio('cat', 'cat') == 100",
    "scikit-learn": "from sklearn.feature_extraction.text import TfidfVectorizer\n"
    "from sklearn.metrics.pairwise import cosine_similarity\n"
    "both = TfidfVectorizer().fit_transform(['a red fox', 'a red fox'])\n"
    "return cosine_similarity(both)[0, 1] > 0.999",
    "rouge-score": "from rouge_score import rouge_scorer\n"
    "return rouge_scorer.RougeScorer(['rougeL'], use_stemmer=True).score('a cat', 'a cat')['rougeL'].fmeasure == 1",
    "deepdiff": "from deepdiff import DeepDiff\nreturn 'values_changed' in DeepDiff({'a': 1}, {'a': 2})",
    "jsonschema": "import jsonschema\njsonschema.validate({'a': 1}, {'required': ['a']})\nreturn True",
    "pydantic": "from pydantic import BaseModel\nclass A(BaseModel):\n    n: int\nreturn A(n='3').n == 3",
    "pyyaml": "import yaml\nreturn yaml.safe_load('a: [1, 2]') == {'a': [1, 2]}",
    "nltk": "import nltk\nfrom nltk.corpus import stopwords\nfrom nltk.translate.bleu_score import sentence_bleu\n"
    "words = nltk.word_tokenize('Dr. Who left. He ran.')\nassert sentence_bleu([words], words) > 0.99\n"
    "assert 'the' in stopwords.words('english')\nreturn len(nltk.sent_tokenize('Dr. Who left. He ran.')) == 2",
    "sqlparse": "import sqlparse\nreturn sqlparse.parse('select 1')[0].get_type() == 'SELECT'",
    "rdkit": "from rdkit import Chem\nfrom rdkit.Chem import Descriptors\n"
    "return 46 < Descriptors.MolWt(Chem.MolFromSmiles('CCO')) < 47",
    "scikit-bio": "from skbio import DNA\nreturn str(DNA('ACGT').reverse_complement()) == 'ACGT'",
    "ast-grep-py": "from ast_grep_py import SgRoot\nroot = SgRoot('print(1)', 'python').root()\n"
    "return root.find(pattern='print($A)').get_match('A').text() == '1'",
}


def _function(name: str, body: str) -> str:
    return f"def use_{name.replace('-', '_')}():\n{textwrap.indent(body, '    ')}\n"


SOURCE = "\n".join(_function(*use) for use in USES.items()) + (
    "\ndef grade(sample, item):\n    return globals()['use_' + item['package'].replace('-', '_')]()\n"
)
