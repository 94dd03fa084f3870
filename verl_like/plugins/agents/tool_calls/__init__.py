"""Tool calls in the text of a response, one class per syntax."""
