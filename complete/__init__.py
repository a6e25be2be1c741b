"""For `python -m complete.train` and `from complete.predict import load`: the files of this folder
import each other by their plain names, as they do where one is started by its path. They are found
before others of these names, such as a train.py of yours.
"""

import sys

sys.path.insert(0, __path__[0])
