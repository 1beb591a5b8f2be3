"""`lmkv proxy`: one OpenAI-compatible address before several engines.

Nothing of it is imported before that verb is on the command line.
"""
