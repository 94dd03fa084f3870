"""Stories in short sentences: 1 for five words a sentence on average, falling to 0 at 13 words and towards none.

Text without a full stop counts as one sentence, so that leaving them out does not pay; neither does an empty answer,
nor repeating one sentence.
"""

from __future__ import annotations

import re
from typing import Any


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any] | None = None
) -> dict[str, float]:
    """`words_per_sentence` and `distinct_words` become metrics, to see what the policy does for its reward."""
    sentences = [words for part in re.split(r"[.!?]+", solution_str) if (words := re.findall(r"[A-Za-z']+", part))]
    words = [word.lower() for sentence in sentences for word in sentence]
    if not words:
        return {"score": 0.0, "words_per_sentence": 0.0, "distinct_words": 0.0}
    mean_length = len(words) / len(sentences)
    brevity = max(0.0, 1 - abs(mean_length - 5) / 8)
    variety = min(1.0, 2 * len(set(words)) / len(words))
    return {
        "score": brevity * variety,
        "words_per_sentence": mean_length,
        "distinct_words": len(set(words)) / len(words),
    }
