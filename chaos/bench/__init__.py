"""Speed, as ratios in one run: Thalweg with everything on, the bare limit of its own libraries, and peers from PyPI.

Every contender moves the same records from the same Kafka broker into the same table of the same Postgres, each
in a process of its own, turn by turn (A B C A B C …), so that the machine's drift hits all alike. CPU is the contender's
own process (user + system, children included); broker and Postgres run elsewhere and are not counted. What a contender
needs to start is measured on a topic of a few records and taken off.
"""
