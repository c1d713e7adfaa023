"""Every refusal the course machinery makes on purpose: one line with the cause and what to do."""


class CourseError(ValueError):
    """Base of all deliberate refusals; the command line prints it without a traceback and exits with 2."""


class ExerciseError(CourseError):
    """A solution notebook whose metadata cannot work. Lists every problem found, one a line."""


class SubmissionError(CourseError):
    """A submission that cannot be read as an answer to the exercise. The message is what the student reads."""
