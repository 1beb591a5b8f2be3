"""The controller: knows which node holds what, and carries out verbs across nodes. Needs the extra `lmkv[controller]`.

`directory` says what is where, `fleet` who is there.
"""
