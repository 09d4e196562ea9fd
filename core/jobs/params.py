"""The parts of a job's body that several checks name, as `param` of their errors."""

GRADER_PARAM = "method.reinforcement.grader"
FORMAT_PARAM = "method.reinforcement.response_format"
TEACHER_PARAM = "method.distillation.teacher.model"
